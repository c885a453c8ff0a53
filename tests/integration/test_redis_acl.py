"""Redis users that may do as little as possible: one for the workers, and one that only reaches bodies."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
import redis.exceptions

from keylane import AsyncClient, Client, ksuid
from keylane.errors import BrokerError, Forbidden
from keylane.payloads import open_store
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server
from tests.support.commands import keylane
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # a server with users of its own

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
CANARY = "canary-5f2a9d"
ADMIN = f"{CANARY}-of-an-administrator"
SOON = 60.0


def rules() -> dict[str, list[str]]:
    """The users of the page, by name."""
    found = re.findall(r"^    ACL SETUSER (\S+) (.*)$", PAGE.read_text(), re.MULTILINE)
    return {name: text.replace("PASSWORD", CANARY).split() for name, text in found}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that lets in only these users, and one for tests to look."""
    with Server() as server, redis.Redis(port=server.port) as connection:
        for name, rule in rules().items():
            connection.execute_command("ACL", "SETUSER", name, *rule)
        connection.execute_command("ACL", "SETUSER", "test", "on", ">test", "~*", "&*", "+@all")
        connection.execute_command("ACL", "SETUSER", "default", "off")
        yield server
        with redis.Redis(port=server.port, username="test", password="test") as last:
            last.execute_command("ACL", "SETUSER", "default", "on")


def url(server: Server, user: str, password: str = CANARY) -> str:
    return f"redis://{user}:{password}@127.0.0.1:{server.port}/0"


@pytest.fixture(scope="module")
def broker(server: Server) -> Iterator[RunningBroker]:
    with RunningBroker(
        url(server, "keylane"), workers=2, http=True, auth=True, admin_token=ADMIN, log_level="debug"
    ) as broker:
        yield broker


async def test_the_core_runs_under_the_rules_of_the_page(
    broker: RunningBroker, server: Server, topic: str
) -> None:
    assert set(rules()) == {"keylane", "bodies"}
    with redis.Redis(port=server.port, username="test", password="test") as look:
        look.execute_command("ACL", "LOG", "RESET")
        async with AsyncClient(broker.url, token=ADMIN) as client:
            await client.create_topic(topic, partitions=2, retention=60, journal=True)
            await client.create_subscription(topic, "s", mode="key_shared", max_retries=1, backoff=None)
            await client.create_subscription(topic, "x", filter={"a": "b"})
            await client.publish(topic, b"fsync", key="k", durability="fsync")
            await client.publish(topic, b"later", key="k", delay=0.01)
            await client.publish(topic, b"large" * 1_000_000, key="k")
            async with client.subscribe(topic, "s", mode="key_shared") as consumer:
                for _ in range(3):
                    message = await consumer.receive(timeout=SOON)
                    await message.extend(30)
                    await message.data()
                    await message.ack()
            await client.seek(topic, "s", "earliest")
            await client.purge(topic, "s")
            await client.describe_topic(topic)
            await client.hot_keys(topic)
            made = await client.create_token("app", ["observe:*"])
            await client.revoke_token(made.id)
            await client.delete_subscription(topic, "x")
            engine = Engine.connect(url(server, "keylane"))
            try:
                assert await check_topic(engine, topic) == []
            finally:
                await engine.close()
            await client.delete_topic(topic)
        refused = look.execute_command("ACL", "LOG")
        assert refused == [], refused
        assert "NOPERM" not in broker.log()


async def test_the_user_for_bodies_reaches_nothing_else(server: Server, topic: str) -> None:
    store = open_store(url(server, "bodies"), lifetime=60)
    small, large = ksuid.take(2)
    await store.put(topic, [(small, b"1"), (large, b"x" * 17 * 1024 * 1024)])
    assert await store.has(topic, [small, large]) == [True, True]
    assert [len(body or b"") for body in await store.get(topic, [small, large])] == [1, 17 * 1024 * 1024]
    await store.sync(topic, [small, large])
    await store.keep(topic, [small, large])
    await store.delete(topic, [small, large])
    assert await store.get(topic, [small, large]) == [None, None]
    with redis.Redis(port=server.port, username="bodies", password=CANARY) as connection:
        for command in (
            ["HGETALL", "kl:tokens"],
            ["EVAL", "return redis.call('HGETALL', 'kl:tokens')", "0"],
            ["KEYS", "*"],
            ["SCAN", "0"],
            ["CONFIG", "GET", "*"],
            ["FLUSHALL"],
            ["SET", "kl:tokens", "1"],
            ["RENAME", "kl:tokens", "kl:bodies:x"],
        ):
            with pytest.raises(
                (redis.exceptions.NoPermissionError, redis.ResponseError), match=r"(?i)noperm|permission"
            ):
                connection.execute_command(*command)
    await store.close()


async def test_trusted_clients_may_have_the_url_of_that_user(server: Server, topic: str) -> None:
    with RunningBroker(
        url(server, "keylane"),
        name="other",
        payloads=url(server, "bodies"),
        auth=True,
        admin_token=ADMIN,
    ) as broker:
        async with AsyncClient(broker.url, token=ADMIN) as client:
            await client.create_topic(topic, partitions=1)
            async with client.subscribe(topic, "s") as consumer:
                await client.publish(topic, b"1")
                message = await consumer.receive(timeout=SOON)
                assert await message.data() == b"1"
                await message.ack()
            info = await client.info()
            assert info.payloads == f"redis://127.0.0.1:{server.port}/0"
            assert CANARY not in repr([info, client, client._bodies, client._cluster])
            await client.delete_topic(topic)
        assert CANARY not in broker.log()


@pytest.mark.slow
def test_no_secret_is_ever_printed(
    broker: RunningBroker, server: Server, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Passwords and tokens, in what commands, errors, logs, objects and HTTP say."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with Client(broker.url, token=ADMIN) as admin:
        admin.create_topic(topic, partitions=1)
        admin.create_subscription(topic, "s")
        made = admin.create_token("app", [f"produce:{topic}"])
        secret = made.token.split("_", 2)[2]
        said += [repr(admin), repr(admin.info()), repr(admin.tokens()), repr(admin.cluster())]
        for wrong in (CANARY, made.token + "x", f"{CANARY}.{CANARY}.{CANARY}"):
            with pytest.raises(BrokerError) as refused:
                Client(broker.url, token=wrong).__enter__()
            said.append(repr(refused.value) + str(refused.value))
        with Client(broker.url, token=made.token) as app:
            app.publish(topic, b"1")
            with pytest.raises(Forbidden) as forbidden:
                app.delete_topic(topic)
            said.append(str(forbidden.value))
    for arguments in (
        ["cluster", "--json"],
        ["doctor", "--json"],
        ["topic", "describe", topic, "--json"],
        ["token", "list", "--json"],
        ["subscription", "list", topic, "--json"],
    ):
        done = keylane(*arguments, status=None, KEYLANE_SERVER=broker.url, KEYLANE_TOKEN=ADMIN)
        said += [done.stdout, done.stderr]
    wrong_url = f"redis://keylane:{CANARY}@127.0.0.1:{server.port}/x"
    for arguments in (
        ["serve", "--redis", wrong_url, "--port", "0"],
        ["serve", "--payloads", url(server, "bodies")],
        ["serve", "--redis", f"redis://keylane:{CANARY}-wrong@127.0.0.1:{server.port}/0", "--port", "0"],
        ["serve", "--redis", f"redis://keylane:{CANARY}@127.0.0.1:1/0", "--port", "0"],
        ["serve", "--auth", "--admin-token", CANARY[:8]],
    ):
        done = keylane(*arguments, status=None)
        assert done.returncode != 0
        said += [done.stdout, done.stderr]
    with httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http:
        for path in (
            "/v1/info",
            "/v1/cluster",
            "/v1/tokens",
            "/metrics",
            "/openapi.json",
            "/readyz",
            "/v1/topics",
        ):
            for token in (ADMIN, f"{CANARY}-wrong"):
                answer = http.get(path, headers={"Authorization": f"Bearer {token}"})
                said.append(f"{answer.headers} {answer.text}")
    said += [broker.log(), caplog.text]
    for text in said:
        for hidden in (CANARY, secret, ADMIN):
            assert hidden not in text, text[max(0, text.find(hidden) - 300) :][:600]
