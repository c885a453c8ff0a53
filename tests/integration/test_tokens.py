"""Tokens on a real broker: who is let in, who may do what, and who has to go."""

import asyncio
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import msgspec
import pytest
import redis
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

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

pytestmark = pytest.mark.slow  # several brokers

ADMIN = "the token of an administrator"
SOON = 60.0
KINDS = ("observe", "produce", "consume", "admin")


SECRET = b"a secret of thirty-two bytes, or more"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    keys = tmp_path_factory.mktemp("jwt") / "keys"
    keys.write_bytes(SECRET)
    with RunningBroker(http=True, auth=True, admin_token=ADMIN, jwt_keys=keys, partition_lease=1.0) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(guarded: RunningBroker) -> Iterator[Client]:
    with Client(guarded.url, token=ADMIN) as client:
        yield client


def token_for(admin: Client, *allow: str, **more: Any) -> str:
    return admin.create_token("somebody", allow, **more).token


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_who_is_revoked_goes_at_once_on_every_worker(topic: str) -> None:
    """However long it is until a worker looks by itself."""
    with (
        RunningBroker(workers=2, http=True, auth=True, admin_token=ADMIN, partition_lease=600.0) as broker,
        Client(broker.url, token=ADMIN) as admin,
    ):
        admin.create_topic(topic, partitions=2)
        made = admin.create_token("leaver", [f"produce:{topic}"])
        own = {"Authorization": f"Bearer {made.token}"}

        def statuses() -> set[int]:
            return {httpx.get(f"{url}/v1/info", headers=own).status_code for url in broker.http_urls}

        with Client(broker.url, token=made.token, timeout=2.0) as client:
            for partition in range(2):
                client.publish(topic, b"1", partition=partition)
            assert statuses() == {200}
            admin.revoke_token(made.id)
            wait_until(lambda: is_refused(client, topic))
        wait_until(lambda: statuses() == {401})


@pytest.mark.slow
def test_a_jwt_is_good_until_it_expires_and_its_keys_may_change(tmp_path: Path, topic: str) -> None:
    """At both ports, and on connections that are open."""
    keys, secret, edwards = tmp_path / "keys", b"s" * 32, ed25519.Ed25519PrivateKey.generate()
    keys.write_bytes(secret)

    def signed(key: Any, algorithm: str, lifetime: float) -> str:
        said = {"sub": "shop", "exp": time.time() + lifetime, "scope": f"admin:{topic}"}
        return jwt.encode(said, key, algorithm)

    with RunningBroker(http=True, auth=True, jwt_keys=keys, partition_lease=1.0) as broker:

        def status(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return httpx.get(f"{broker.http_urls[0]}/v1/topics/{topic}", headers=headers).status_code

        with Client(broker.url, token=signed(secret, "HS256", 600), timeout=2.0) as client:
            client.create_topic(topic, partitions=1)
            short = signed(secret, "HS256", 8)
            with Client(broker.url, token=short, timeout=2.0) as guest:
                guest.publish(topic, b"1")
                assert status(short) == 200
                wait_until(lambda: is_refused(guest, topic))
            assert status(short) == 401
            with pytest.raises(Unauthorized, match="expired"):
                Client(broker.url, token=short).__enter__()
            newer = signed(edwards, "EdDSA", 600)
            assert status(newer) == 401
            keys.write_bytes(
                edwards.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            )
            assert status(newer) == 200
            assert status(signed(secret, "HS256", 600)) == 401
            with Client(broker.url, token=newer) as other:
                other.publish(topic, b"2")
            wait_until(lambda: "the key that has signed for 'shop' is not trusted any more" in broker.log())
            with pytest.raises(Unauthorized):
                client.describe_topic(topic)


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


@pytest.fixture(scope="module", params=["static", "JWT"])
def tokens(admin: Client, request: pytest.FixtureRequest) -> dict[str, str]:
    """A token for each kind of permission, on topics called mine-…"""
    grants = {kind: f"{kind}:mine-*" for kind in KINDS}
    if request.param == "static":
        return {kind: admin.create_token(kind, [grant]).token for kind, grant in grants.items()}
    claims = {"sub": "somebody", "exp": time.time() + 3600}
    return {kind: jwt.encode({**claims, "scope": grant}, SECRET, "HS256") for kind, grant in grants.items()}


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


# Anybody may ask for INFO, and settle what a stream has: that was opened with the right to consume.
OF_ALL = (Type.INFO, Type.UNSUBSCRIBE, Type.ACK, Type.NACK, Type.EXTEND)
BINARY = {type: kind for type, (kind, *_) in HANDLERS.items() if type not in OF_ALL}
BINARY |= {wire.Publish.TYPE: wire.Publish}  # which has no handler, as it is hot


@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_needs_its_permission(
    guarded: RunningBroker, tokens: dict[str, str], kind: str
) -> None:
    for type, properties in BINARY.items():
        needs = NEEDS[Type(type).name.lower()]
        has_topic = "topic" in {field.name for field in msgspec.structs.fields(properties)}
        for topic in ("mine-1", "other-1"):
            code = await refusal(guarded, tokens[kind], request_of(properties, topic))
            if type == Type.TOPICS:
                assert code == ""
            elif has_topic and topic == "mine-1" and allowed(kind, needs):
                assert code != "forbidden", (Type(type).name, kind)
            else:
                assert code == "forbidden", (Type(type).name, kind, topic, code)


async def test_who_may_not_consume_has_no_stream_to_settle_on(
    guarded: RunningBroker, tokens: dict[str, str]
) -> None:
    for kind in ("observe", "produce"):
        async with connect(guarded.urls[0], tokens[kind]) as peer:
            with pytest.raises(Refused, match="forbidden"):
                await peer.answer(wire.Subscribe(1, "mine-1", "s", "c"))
            for request in (wire.Ack(1, 0), wire.Nack(1, 0), wire.Extend(1, 0, lease_ms=1_000)):
                with pytest.raises(Refused, match="stream"):
                    await peer.answer(request, wire.pack([]))


async def refusal(broker: RunningBroker, token: str, request: wire.Properties) -> str:
    """The code that a request is refused with, "" if it is not."""
    async with connect(broker.urls[0], token) as peer:
        try:
            await peer.answer(request)
        except Refused as refused:
            return refused.code
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", OPERATIONS, ids=[one.name for one in OPERATIONS])
def test_every_operation_of_http_needs_its_permission(
    guarded: RunningBroker, tokens: dict[str, str], one: Any, kind: str
) -> None:
    has_topic = "{topic}" in one.path or one.name == "create_topic"
    for topic in ("mine-1", "other-1"):
        path = one.path.replace("{partition}", "0").replace("{topic}", topic)
        for name in ("subscription", "id", "worker", "token"):
            path = path.replace("{" + name + "}", "x")
        with httpx.Client(base_url=guarded.http_urls[0], timeout=SOON) as http:
            assert http.request(one.method, path).status_code == 401
            headers = {"Authorization": f"Bearer {tokens[kind]}"}
            body = b'{"name": "%s"}' % topic.encode() if one.name == "create_topic" else b""
            with http.stream(one.method, path, headers=headers, content=body) as answer:
                status = answer.status_code
        may = one.name in ("info", "topics") or (
            has_topic and topic == "mine-1" and allowed(kind, one.action)
        )
        assert (status == 403) is not may, (one.name, kind, topic, status)


@pytest.mark.slow
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
