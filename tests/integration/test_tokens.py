"""Tokens on a real broker: who is let in, who may do what, and who has to go."""

import asyncio
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import redis

from keylane import Client, Forbidden, Unauthorized, Unavailable, wire
from keylane.wire import Type
from keylane_broker.access.actions import NEEDS
from keylane_broker.access.control import AccessControl
from keylane_broker.http.app import OPERATIONS
from keylane_broker.store.store import Store
from keylane_broker.worker.requests.table import HANDLERS
from tests.support.commands import keylane
from tests.support.peer import Refused, connect
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

ADMIN = "the token of an administrator"
SOON = 60.0
KINDS = ("observe", "produce", "consume", "admin")


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, auth=True, admin_token=ADMIN, partition_lease=1.0) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(guarded: RunningBroker) -> Iterator[Client]:
    with Client(guarded.url, token=ADMIN) as client:
        yield client


def token_for(admin: Client, *allow: str, **more: Any) -> str:
    return admin.create_token("somebody", allow, **more).token


def test_who_has_no_token_or_a_wrong_one_is_not_let_in(guarded: RunningBroker, admin: Client) -> None:
    made = token_for(admin, "observe:*")
    for token in (
        "",
        "wrong",
        made[:-1] + ("a" if made[-1] != "a" else "b"),
        "kl_0123456789abcdef_" + "a" * 43,
    ):
        with pytest.raises(Unauthorized):
            Client(guarded.url, token=token).__enter__()
        answer = httpx.get(
            f"{guarded.http_urls[0]}/v1/info", headers={"Authorization": f"Bearer {token or 0}"}
        )
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{guarded.http_urls[0]}/healthz").status_code == 200


async def test_a_token_is_good_on_every_worker_as_soon_as_it_is_made(guarded: RunningBroker) -> None:
    store = Store.connect(guarded.redis_url)
    try:
        here, there = (AccessControl(store, enabled=True, admin_token=ADMIN, jwt_keys=None) for _ in range(2))
        for name in ("first", "second"):
            await there.refresh()  # it has just looked, and knows nothing of what is made now
            _, token = await here.create(name, ["observe:*"], 0, 0)
            made = await asyncio.gather(there.identify(token), there.identify(token))
            assert [identity.name for identity in made] == [name, name]
    finally:
        await store.close()


def test_a_token_allows_what_it_says_and_nothing_else(
    guarded: RunningBroker, admin: Client, topic: str
) -> None:
    for name in (topic, f"{topic}.eu", f"other-{topic}"):
        admin.create_topic(name, partitions=1)
    admin.create_subscription(f"{topic}.eu", "s")
    with Client(guarded.url, token=token_for(admin, f"produce:{topic}*")) as producer:
        producer.publish(f"{topic}.eu", b"1")
        assert producer.topics() == [topic, f"{topic}.eu"]
        with pytest.raises(Forbidden, match="somebody"):
            producer.publish(f"other-{topic}", b"1")
        with pytest.raises(Forbidden):
            producer.subscribe(f"{topic}.eu", "s").__enter__()
        with pytest.raises(Forbidden):
            producer.delete_topic(topic)
        with pytest.raises(Forbidden):
            producer.create_token("more", ["admin:*"])
    with (
        Client(guarded.url, token=token_for(admin, f"consume:{topic}.eu")) as reader,
        reader.subscribe(f"{topic}.eu", "s") as consumer,
    ):
        message = consumer.receive(timeout=SOON)
        assert message.data() == b"1"
        message.ack()
        with pytest.raises(Forbidden):
            reader.publish(f"{topic}.eu", b"2")


def test_who_is_revoked_or_has_expired_has_to_go(guarded: RunningBroker, admin: Client, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    made = admin.create_token("leaver", [f"produce:{topic}"])
    for lifetime in (None, 10.0):
        token = admin.create_token("guest", [f"produce:{topic}"], lifetime=lifetime) if lifetime else made
        with Client(guarded.url, token=token.token, timeout=2.0) as client:
            client.publish(topic, b"1")
            if token is made:
                admin.revoke_token(made.id)
            wait_until(lambda: is_refused(client, topic))
        answer = httpx.get(
            f"{guarded.http_urls[0]}/v1/info", headers={"Authorization": f"Bearer {token.token}"}
        )
        assert answer.status_code == 401
    assert made.id not in {one.id for one in admin.tokens()}


def is_refused(client: Client, topic: str) -> bool:
    try:
        client.publish(topic, b"2")
    except (Unauthorized, Unavailable):  # the connection has ended, and there is no other
        return True
    return False


def test_redis_has_no_token_that_could_be_used(guarded: RunningBroker, admin: Client) -> None:
    made = admin.create_token("secretive", ["observe:*"])
    with redis.Redis.from_url(guarded.redis_url, decode_responses=True) as connection:
        stored = connection.hgetall("kl:tokens")
    secret = made.token.split("_", 2)[2]
    assert made.id in stored
    assert secret not in str(stored)
    assert ADMIN not in str(stored)


# Every operation x every kind of token


def allowed(kind: str, needs: str) -> bool:
    return kind in ("admin", needs) or needs == "observe" or (needs == "use" and kind != "observe")


@pytest.fixture(scope="module")
def tokens(admin: Client) -> dict[str, str]:
    """A token for each kind of permission, on topics called mine-…"""
    return {kind: admin.create_token(kind, [f"{kind}:mine-*"]).token for kind in KINDS}


def sample(annotation: Any) -> Any:
    """Something of a type, to fill in what a request must have."""
    kinds = typing.get_args(annotation) or (annotation,)
    if typing.get_origin(annotation) in (list, tuple, dict):
        return typing.get_origin(annotation)()
    return {str: "x", int: 0, bool: False, float: 0.0}.get(kinds[0])


def request_of(kind: type[wire.Properties], topic: str) -> wire.Properties:
    fields = {
        field.name: topic if field.name == "topic" else sample(field.type)
        for field in msgspec.structs.fields(kind)
        if field.required or field.name == "topic"
    }
    return kind(**fields)


BINARY = [
    type for type in HANDLERS if type not in (Type.INFO, Type.UNSUBSCRIBE, Type.ACK, Type.NACK, Type.EXTEND)
]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_needs_its_permission(
    guarded: RunningBroker, tokens: dict[str, str], kind: str
) -> None:
    for type in BINARY:
        needs = NEEDS[Type(type).name.lower()]
        properties = HANDLERS[type][0]
        has_topic = "topic" in {field.name for field in msgspec.structs.fields(properties)}
        for topic in ("mine-1", "other-1"):
            code = await refusal(guarded, tokens[kind], request_of(properties, topic))
            if type == Type.TOPICS:
                assert code == ""
            elif has_topic and topic == "mine-1" and allowed(kind, needs):
                assert code != "forbidden", (Type(type).name, kind)
            else:
                assert code == "forbidden", (Type(type).name, kind, topic, code)


async def refusal(broker: RunningBroker, token: str, request: wire.Properties) -> str:
    """The code that a request is refused with, "" if it is not."""
    async with connect(broker.urls[0], token) as peer:
        try:
            await peer.answer(request)
        except Refused as refused:
            return refused.code
    return ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", OPERATIONS, ids=[one.name for one in OPERATIONS])
def test_every_operation_of_http_needs_its_permission(
    guarded: RunningBroker, tokens: dict[str, str], one: Any, kind: str
) -> None:
    has_topic = "{topic}" in one.path
    for topic in ("mine-1", "other-1"):
        path = one.path.replace("{partition:int}", "0").replace("{topic}", topic)
        for name in ("subscription", "id", "worker", "token"):
            path = path.replace("{" + name + "}", "x")
        with httpx.Client(base_url=guarded.http_urls[0], timeout=SOON) as http:
            assert http.request(one.method, path).status_code == 401
            headers = {"Authorization": f"Bearer {tokens[kind]}"}
            with http.stream(one.method, path, headers=headers) as answer:
                status = answer.status_code
        may = one.name in ("info", "topics") or (
            has_topic and topic == "mine-1" and allowed(kind, one.action)
        )
        assert (status == 403) is not may, (one.name, kind, topic, status)


def test_tokens_by_command(guarded: RunningBroker, topic: str) -> None:
    environment: dict[str, Any] = {"KEYLANE_SERVER": guarded.url, "KEYLANE_TOKEN": ADMIN}
    made = keylane("token", "create", "shop", "--allow", f"admin:{topic}", **environment).stdout.strip()
    own: dict[str, Any] = {"KEYLANE_SERVER": guarded.url, "KEYLANE_TOKEN": made}
    keylane("topic", "create", topic, **own)
    refused = keylane("topic", "create", f"{topic}-2", status=1, **own)
    assert "may not admin" in refused.stderr
    listed = keylane("token", "list", **environment).stdout
    assert "shop" in listed
    assert made not in listed
    keylane("token", "revoke", made.split("_")[1], **environment)
    assert "revoked" in keylane("topic", "list", status=1, **own).stderr
    wrong = keylane("token", "create", "shop", "--allow", "everything", status=1, **environment)
    assert "produce:orders.*" in wrong.stderr
