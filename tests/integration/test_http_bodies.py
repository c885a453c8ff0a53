"""Bodies by way of the workers: for clients that have no Redis credentials, and larger than memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
import redis

from keylane import AsyncClient, Client, Forbidden, OutgoingMessage, PayloadMissing, ksuid
from loadtest.topology import single_server
from tests.support.running import RunningBroker
from tests.support.waiting import until, wait_until

ADMIN = "the token of an administrator"
SOON = 60.0
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningBroker]:
    """Two workers that let in only who has a token."""
    with RunningBroker(workers=2, http=True, auth=True, admin_token=ADMIN) as broker:
        yield broker


@pytest.fixture
def admin(guarded: RunningBroker) -> Iterator[Client]:
    with Client(guarded.url, token=ADMIN) as client:
        yield client


def bodies_in(broker: RunningBroker, topic: str) -> list[bytes]:
    with redis.Redis.from_url(broker.redis_url) as connection:
        return list(connection.scan_iter(f"kl:bodies:{topic}:*"))


@pytest.mark.slow
async def test_who_has_a_token_needs_no_redis(guarded: RunningBroker, admin: Client, topic: str) -> None:
    admin.create_topic(topic, partitions=4)
    tokens = [admin.create_token("app", [f"{what}:{topic}"]).token for what in ("produce", "consume")]
    contents = [b"x" * size for size in (0, 1, 100, 300_000, 3 * MIB)]
    async with (
        AsyncClient(guarded.url, token=tokens[0]) as producer,
        AsyncClient(guarded.url, token=tokens[1]) as reader,
        reader.subscribe(topic, "s") as consumer,
    ):
        assert (await producer.info()).payloads == "keylane+http://"
        await asyncio.gather(*(producer.publish(topic, body, key=str(len(body))) for body in contents))
        found = []
        for _ in contents:
            message = await consumer.receive(timeout=SOON)
            found.append(await message.data())
            await message.ack()
        assert sorted(found) == sorted(contents)
        await until(lambda: not bodies_in(guarded, topic))
        # What nobody is owed is deleted by who has stored it.
        await producer.publish(topic, b"twice", uid="u", key="k")
        assert (await producer.publish(topic, b"twice", uid="u", key="k")).duplicate
        message = await consumer.receive(timeout=SOON)
        assert await message.data() == b"twice"
        await message.ack()
        await until(lambda: not bodies_in(guarded, topic))


@pytest.mark.slow
async def test_bodies_are_for_those_who_may_produce_or_consume_there(
    guarded: RunningBroker, admin: Client, topic: str
) -> None:
    for name in (topic, f"other-{topic}"):
        admin.create_topic(name, partitions=1)
    admin.create_subscription(topic, "s")
    produce, consume, other = (
        admin.create_token("app", [grant]).token
        for grant in (f"produce:{topic}", f"consume:{topic}", f"admin:other-{topic}")
    )
    [name] = ksuid.take(1)
    path = f"{guarded.http_urls[0]}/v1/bodies/{topic}/{name}"

    def status(method: str, token: str, content: bytes | None = None) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, path, headers=headers, content=content).status_code

    assert status("PUT", consume, b"1") == 403
    assert status("PUT", other, b"1") == 403
    assert bodies_in(guarded, topic) == []
    assert status("PUT", produce, b"1") == 200
    assert status("GET", produce) == 403
    assert status("GET", other) == 403
    assert status("DELETE", other) == 403
    assert status("GET", consume) == 200
    assert status("DELETE", produce) == 204
    assert status("GET", consume) == 404
    async with AsyncClient(guarded.url, token=consume) as reader:
        with pytest.raises(Forbidden):
            await reader._bodies.put(topic, [(name, b"1")])


async def test_who_may_not_publish_is_told_so_and_nothing_of_bodies_that_were_never_stored(
    guarded: RunningBroker, admin: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(topic, partitions=1)
    token = admin.create_token("reader", [f"observe:{topic}"]).token
    async with AsyncClient(guarded.url, token=token) as client:
        with pytest.raises(Forbidden):
            await client.publish(topic, b"1")
        with pytest.raises(Forbidden):
            await client.publish_many(topic, [OutgoingMessage(b"1"), OutgoingMessage(b"2")])
        await client._bodies.finish()
    assert bodies_in(guarded, topic) == []
    assert "could not delete" not in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e%2f%2e%2e",
        "x" * 26,
        "x" * 28,
        "x" * 26 + "}",
        "x" * 26 + "%0a",
        "a" * 26 + "%00",
        "%C3%A9" * 27,
    ],
)
def test_a_name_that_is_none_is_refused(guarded: RunningBroker, topic: str, name: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    for where in (f"/v1/bodies/{topic}/{name}", f"/v1/bodies/a%3a{{b}}/{ksuid.take(1)[0]}"):
        answer = httpx.put(guarded.http_urls[0] + where, content=b"1", headers=headers)
        assert answer.status_code in (400, 404, 405), (where, answer.text)
    assert bodies_in(guarded, topic) == []


async def test_bodies_of_dead_letters_are_read_where_they_are(
    guarded: RunningBroker, admin: Client, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    async with AsyncClient(guarded.url, token=ADMIN) as client:
        await client.create_subscription(topic, "s", max_retries=0)
        await client.publish(topic, b"poison")
        async with client.subscribe(topic, "s") as consumer:
            await (await consumer.receive(timeout=SOON)).nack()
            await until(lambda: f"{topic}.dead" in admin.topics())
            async with client.subscribe(f"{topic}.dead", "d", start="earliest") as dead:
                message = await dead.receive(timeout=SOON)
                assert await message.data() == b"poison"


async def test_a_body_that_is_gone_is_missing(guarded: RunningBroker, admin: Client, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    async with (
        AsyncClient(guarded.url, token=ADMIN) as client,
        client.subscribe(topic, "s") as consumer,
    ):
        await client.publish(topic, b"x" * 5 * MIB)
        with redis.Redis.from_url(guarded.redis_url) as connection:
            for key in bodies_in(guarded, topic):
                connection.delete(key)
        with pytest.raises(PayloadMissing):
            await (await consumer.receive(timeout=SOON)).data()


@pytest.mark.slow
async def test_clients_go_on_with_another_worker_when_one_dies(topic: str) -> None:
    with RunningBroker(
        workers=2, http=True, http_port=1, payloads="keylane+http://", partition_lease=1.0
    ) as broker:
        with Client(broker.url) as admin:
            admin.create_topic(topic, partitions=4)
        async with AsyncClient(broker.url) as client, client.subscribe(topic, "s") as consumer:
            for round in range(2):
                for number in range(10):
                    await client.publish(topic, f"{round}-{number}", key=str(number))
                if not round:
                    broker.kill_worker(1)
            found: set[bytes] = set()
            while len(found) < 20:
                message = await consumer.receive(timeout=SOON)
                found.add(await message.data())
                await message.ack()
            broker.start_worker(1)
            await client.publish(topic, b"after")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lease", "events"])
async def test_what_a_lease_cannot_hand_out_goes_back_at_once_and_uncharged(topic: str, how: str) -> None:
    with single_server(appendonly=True) as store, RunningBroker(http=True, payloads=store.url) as broker:
        async with (
            AsyncClient(broker.url) as client,
            httpx.AsyncClient(base_url=broker.http_urls[0], timeout=SOON) as http,
        ):
            await client.create_topic(topic, partitions=1)
            await client.create_subscription(topic, "s", lease=600.0, max_retries=0)
            await client.publish(topic, b"42")
            store.kill()
            path = f"/v1/topics/{topic}/subscriptions/s"
            if how == "lease":
                answer = await http.post(f"{path}/lease", json={"wait": SOON})
                assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
            else:
                async with http.stream("GET", f"{path}/events") as response:
                    assert "event: error" in [line async for line in response.aiter_lines()]

            async def is_free() -> bool:
                return (await client.describe_subscription(topic, "s")).leased == 0

            await until(is_free)
            store.start()
            answer = await http.post(f"{path}/lease", json={"wait": SOON})
            [message] = answer.json()["messages"]
            assert (message["data"], message["retry_count"]) == ("42", 0)


# Larger than memory


@pytest.fixture
def served() -> Iterator[RunningBroker]:
    with RunningBroker(http=True) as broker:
        yield broker


NOISE, LINES = hashlib.sha256(b"noise").digest() * 8192, b"a short\n" * 32_768


async def body_of(block: bytes, size: int, digest: "hashlib._Hash") -> AsyncIterator[bytes]:
    for number in range(size // len(block)):
        part = number.to_bytes(8, "big") + block[8:]
        digest.update(part)
        yield part


@pytest.fixture(scope="module")
def small_frames() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, max_frame=MIB) as broker:
        yield broker


@pytest.mark.slow
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_a_lease_has_bodies_up_to_a_limit_in_all_and_says_where_the_others_are(
    small_frames: RunningBroker, topic: str, delivery: Any
) -> None:
    """At most once what is read is deleted, and so what goes elsewhere must not have been."""
    inline, large = b"i" * 10_000, 150_000
    async with (
        AsyncClient(small_frames.url) as client,
        httpx.AsyncClient(base_url=small_frames.http_urls[0], timeout=SOON) as http,
    ):
        await client.create_topic(topic, partitions=1, inline=len(inline))
        await client.create_subscription(topic, "s", mode="shared", delivery=delivery)
        sent = [inline if at % 7 == 6 else bytes([at + 33]) * large for at in range(56)]
        for at in range(0, len(sent), 14):
            await client.publish_many(topic, [OutgoingMessage(body) for body in sent[at : at + 14]])
        leased, found = list[dict[str, Any]](), list[bytes]()
        while len(leased) < len(sent):
            said = {"max_messages": 100, "wait": SOON}
            answer = await http.post(f"/v1/topics/{topic}/subscriptions/s/lease", json=said)
            messages = answer.json()["messages"]
            assert sum(len(message.get("data", "")) for message in messages) <= MIB
            leased += messages
        assert any("body" in message for message in leased)
        for message in leased:
            if "body" in message:
                body = await http.get(message["body"])
                assert body.status_code == 200, body.text
                found.append(body.content)
            else:
                found.append(message["data"].encode())
        assert sorted(found) == sorted(sent)
        if delivery == "at_least_once":
            receipts = [message["receipt"] for message in leased]
            settled = await http.post(f"/v1/topics/{topic}/subscriptions/s/ack", json={"receipts": receipts})
            assert settled.json()["results"] == ["settled"] * len(sent)
            await until(lambda: not bodies_in(small_frames, topic))


@pytest.mark.slow
@pytest.mark.parametrize("block", [NOISE, LINES], ids=["noise", "lines"])
async def test_a_large_body_does_not_raise_the_memory_of_the_worker(
    served: RunningBroker, topic: str, block: bytes
) -> None:
    """By publishing and by /v1/bodies, in and out."""
    size = 160 * MIB
    worker = psutil.Process(served.pid)
    async with (
        httpx.AsyncClient(base_url=served.http_urls[0], timeout=SOON) as http,
        AsyncClient(served.url) as client,
    ):
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        warm = hashlib.sha256()
        await http.post(f"/v1/topics/{topic}/messages", content=body_of(block, 2 * MIB, warm))
        await client.purge(topic)
        before = highest = worker.memory_info().rss

        async def watch() -> None:
            nonlocal highest
            while True:
                highest = max(highest, worker.memory_info().rss)
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        sent, got = hashlib.sha256(), hashlib.sha256()
        headers = {"Content-Type": "application/octet-stream", "Keylane-Key": "k"}
        content = body_of(block, size, sent)
        answer = await http.post(f"/v1/topics/{topic}/messages", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        leased = await http.post(f"/v1/topics/{topic}/subscriptions/s/lease", json={"wait": SOON})
        [message] = leased.json()["messages"]
        assert (message["size"], message.get("data")) == (size, None)
        async with http.stream("GET", message["body"]) as body:
            async for part in body.aiter_bytes():
                got.update(part)
        assert got.hexdigest() == sent.hexdigest()
        watching.cancel()
        assert highest - before < size // 4, (highest - before) // MIB
        await http.post(f"/v1/topics/{topic}/subscriptions/s/ack", json={"receipts": [message["receipt"]]})
    wait_until(lambda: not bodies_in(served, topic))
