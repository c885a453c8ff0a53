"""Every kind of payload store keeps the same promises, and survives what its server does to it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import fsspec  # type: ignore[import-untyped]
import pytest
from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from keylane import ksuid
from keylane.errors import BrokerError, DurabilityNotReached, InvalidArgument, Overloaded, Unavailable
from keylane.payloads import PayloadStore, open_store
from keylane.payloads.redis import RedisStore
from keylane.payloads.store import PART
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import Cluster, sentinel_pair, single_server, three_node_cluster
from tests.support.running import RunningBroker
from tests.support.waiting import PATIENCE, until

T = TypeVar("T")
LIFETIME = 3_600.0
CENTURY = 100 * 365 * 86_400.0  # for tests with names from long ago


@dataclass(frozen=True)
class Kind:
    """A store, and a way to look at what it holds of a topic from outside."""

    store: PayloadStore
    remains: Callable[[str], Awaitable[list[str]]]  # the keys or files that are there


async def keys_of(url: str, topic: str) -> list[str]:
    """The keys with bodies of a topic."""
    store = Store.connect(url)
    try:
        return list(await store.keys_like(f"kl:bodies:{topic}:*"))
    finally:
        await store.close()


def files_of(root: Path, topic: str) -> list[str]:
    """The files and folders of a topic."""
    return [str(path) for path in (root / topic).rglob("*")] + ([topic] if (root / topic).exists() else [])


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    """Workers who keep bodies for clients."""
    with RunningBroker(workers=2, http=True) as broker:
        yield broker


@pytest.fixture(params=["redis", "cluster", "file", "memory", "http"])
async def kind(
    request: pytest.FixtureRequest, server_url: str, cluster_url: str, tmp_path: Path
) -> AsyncIterator[Kind]:
    """Each kind of store that there is."""
    if request.param == "http":
        broker: RunningBroker = request.getfixturevalue("served")
        hosts = ",".join(url.removeprefix("http://") for url in broker.http_urls)
        store = open_store(f"keylane+http://{hosts}", lifetime=CENTURY)
        yield Kind(store, lambda topic: keys_of(broker.redis_url, topic))
        await store.close()
        return
    root, memory = tmp_path / "bodies", fsspec.filesystem("memory")
    spread = cluster_url.replace("redis:", "redis+cluster:")
    url, remains = {
        "redis": (server_url, lambda topic: keys_of(server_url, topic)),
        "cluster": (spread, lambda topic: keys_of(spread, topic)),
        "file": (f"file://{root}", lambda topic: to_thread.run_sync(files_of, root, topic)),
        "memory": (f"memory:/{root}", lambda topic: to_thread.run_sync(memory.find, f"{root}/{topic}")),
    }[request.param]
    store = open_store(url, lifetime=CENTURY)
    yield Kind(store, remains)
    await store.close()


def bodies_of(*contents: bytes) -> list[tuple[str, bytes]]:
    """Bodies under names of their own."""
    return list(zip(ksuid.take(len(contents)), contents, strict=True))


async def test_bodies_come_back_as_they_were_and_nothing_remains_after_delete(kind: Kind, topic: str) -> None:
    bodies = bodies_of(b"42", b"", bytes(range(256)), b"\r\n$-1\r\n", "Zürich".encode())
    names = [name for name, _ in bodies]
    await kind.store.put(topic, bodies)
    assert await kind.store.get(topic, names) == [body for _, body in bodies]
    assert await kind.remains(topic)
    await kind.store.delete(topic, names)
    assert await kind.store.get(topic, names) == [None] * 5
    assert await kind.remains(topic) == []


async def test_nothing_in_gives_nothing_out(kind: Kind, topic: str) -> None:
    await kind.store.put(topic, [])
    assert await kind.store.get(topic, []) == []
    await kind.store.delete(topic, [])
    assert await kind.remains(topic) == []


@pytest.mark.slow
async def test_a_big_batch_goes_through_at_once(kind: Kind, topic: str) -> None:
    bodies = bodies_of(*(b"%100d" % number for number in range(2_000)))
    names = [name for name, _ in bodies]
    await kind.store.put(topic, bodies)
    assert await kind.store.get(topic, names[::-1]) == [body for _, body in bodies[::-1]]
    await kind.store.delete(topic, names)
    assert await kind.remains(topic) == []


@pytest.mark.slow
async def test_big_bodies_go_through_too(kind: Kind, topic: str) -> None:
    bodies = bodies_of(*(os.urandom(5_000_000) for _ in range(4)))  # more than one transaction takes
    names = [name for name, _ in bodies]
    await kind.store.put(topic, bodies)
    assert await kind.store.get(topic, names) == [body for _, body in bodies]
    await kind.store.delete(topic, names)
    assert await kind.remains(topic) == []


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def read_all(store: PayloadStore, topic: str, name: str) -> tuple[bytes | None, int]:
    """A body that is read in parts, and the length of the longest of these."""
    found = await store.read(topic, name)
    parts = None if found is None else [part async for part in found]
    return (None, 0) if parts is None else (b"".join(parts), max(map(len, parts), default=0))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART + 7])
async def test_a_body_in_parts_is_a_body_as_any_other(kind: Kind, topic: str, size: int) -> None:
    small, [(name, body)] = bodies_of(b"small"), bodies_of(os.urandom(size))
    await kind.store.put(topic, small)
    assert await kind.store.write(topic, name, pieces(body, 65_536 + 1)) == size
    assert await kind.store.get(topic, [small[0][0], name]) == [b"small", body]
    assert await kind.store.has(topic, [name]) == [True]
    found, longest = await read_all(kind.store, topic, name)
    assert (found, longest <= PART) == (body, True)
    await kind.store.keep(topic, [name])
    await kind.store.delete(topic, [name, small[0][0]])
    assert await read_all(kind.store, topic, name) == (None, 0)
    assert await kind.store.get(topic, [name]) == [None]
    assert await kind.remains(topic) == []


async def test_half_a_body_is_never_seen_and_nothing_stays_of_it(kind: Kind, topic: str) -> None:
    [(name, body)] = bodies_of(os.urandom(3 * PART))

    async def half() -> AsyncIterator[bytes]:
        async for piece in pieces(body[: 2 * PART + 5], PART):
            yield piece
        assert await kind.store.has(topic, [name]) == [False]
        raise ConnectionResetError("the client has gone")

    with pytest.raises(ConnectionResetError):
        await kind.store.write(topic, name, half())
    assert await kind.store.get(topic, [name]) == [None]
    assert await kind.remains(topic) == []


async def test_a_body_that_is_deleted_while_it_is_read_is_not_taken_for_a_short_one(
    kind: Kind, topic: str
) -> None:
    [(name, body)] = bodies_of(os.urandom(3 * PART))
    await kind.store.write(topic, name, pieces(body, PART))
    parts = await kind.store.read(topic, name)
    assert parts is not None
    found = await anext(parts)
    await kind.store.delete(topic, [name])
    with contextlib.suppress(Unavailable):  # some have the rest already
        found += b"".join([part async for part in parts])
        assert found == body


async def test_a_body_is_read_up_to_the_size_that_is_said_for_it_each_time(kind: Kind, topic: str) -> None:
    """What producers say of its size counts against a worker's memory: of one body they may say several."""
    (small, body), (large, long), (missing, _) = bodies_of(b"x" * 100, b"y" * 3 * PART, b"")
    await kind.store.put(topic, [(small, body)])
    await kind.store.write(topic, large, pieces(long, PART))
    names = [small, small, large, small, large, missing]
    found = await kind.store.get_up_to(topic, names, [100, 99, 0, 1_000, 3 * PART, 5])
    assert found == [body, True, True, body, long, None]


async def test_a_body_that_is_not_there_is_none_among_those_that_are(kind: Kind, topic: str) -> None:
    (first, second), lost = bodies_of(b"1", b"2"), ksuid.take(1)[0]
    await kind.store.put(topic, [first, second])
    assert await kind.store.get(topic, [lost, first[0], lost, second[0]]) == [None, b"1", None, b"2"]
    assert await kind.store.has(topic, [lost, first[0], lost, second[0]]) == [False, True, False, True]
    assert await kind.store.has(topic, [lost]) == [False]
    assert await kind.store.has(topic, []) == []


async def test_deleting_twice_and_deleting_what_never_was_is_fine(kind: Kind, topic: str) -> None:
    bodies = bodies_of(b"1", b"2", b"3")
    names = [name for name, _ in bodies]
    await kind.store.put(topic, bodies)
    await kind.store.delete(topic, names[:1])
    await kind.store.delete(topic, [*names[:2], *ksuid.take(2), names[1]])
    assert await kind.store.get(topic, names) == [None, None, b"3"]


async def test_storing_again_changes_nothing(kind: Kind, topic: str) -> None:
    bodies = bodies_of(b"1", b"2")
    await kind.store.put(topic, bodies)
    await kind.store.put(topic, bodies)
    assert await kind.store.get(topic, [name for name, _ in bodies]) == [b"1", b"2"]


async def test_topics_are_separate(kind: Kind, make_topic_name: Callable[[], str]) -> None:
    one, other = make_topic_name(), make_topic_name()
    name = ksuid.take(1)[0]
    await kind.store.put(one, [(name, b"one")])
    await kind.store.put(other, [(name, b"other")])
    await kind.store.delete(one, [name])
    assert await kind.store.get(one, [name]) == [None]
    assert await kind.store.get(other, [name]) == [b"other"]


@pytest.mark.slow
async def test_names_of_different_times_are_found_together(kind: Kind, topic: str) -> None:
    names = [*ksuid.take(2), "0ujtsYcgvSTl8PAuAdqWYSMnLOv", "1srOrx2ZWZBpBUvZwXKQmoEYga2"]
    await kind.store.put(topic, [(name, name.encode()) for name in names])
    assert await kind.store.get(topic, names) == [name.encode() for name in names]
    await kind.store.delete(topic, names)
    assert await kind.remains(topic) == []


async def test_bodies_come_in_the_order_asked_for_however_their_times_mix(kind: Kind, topic: str) -> None:
    names = [f"{at % 3}{at:026d}" for at in range(1, 61)]
    await kind.store.put(topic, [(name, name.encode()) for name in names[:50]])
    for some in (names, sorted(names), names[:5], [names[0], names[1], names[0]]):
        expected = [name.encode() if name in names[:50] else None for name in some]
        assert await kind.store.get(topic, some) == expected


@pytest.mark.slow
async def test_many_at_once_do_not_disturb_each_other(kind: Kind, topic: str) -> None:
    async def round_trip(number: int) -> None:
        bodies = bodies_of(*(b"%d %d" % (number, index) for index in range(10)))
        names = [name for name, _ in bodies]
        await kind.store.put(topic, bodies)
        assert await kind.store.get(topic, names) == [body for _, body in bodies]
        await kind.store.delete(topic, names)

    async with anyio.create_task_group() as tasks:
        for number in range(60):
            tasks.start_soon(round_trip, number)
    assert await kind.remains(topic) == []


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete"]),
        st.lists(
            st.tuples(st.integers(0, 7), st.binary(max_size=50)), max_size=6, unique_by=lambda item: item[0]
        ),
    ),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
async def test_a_store_does_what_a_dictionary_does(
    kind: Kind, make_topic_name: Callable[[], str], steps: list[tuple[str, list[tuple[int, bytes]]]]
) -> None:
    topic, names = make_topic_name(), ksuid.take(8)
    model: dict[str, bytes] = {}
    for step, items in steps:
        asked = [names[number] for number, _ in items]
        if step == "put":
            bodies = [(names[number], body) for number, body in items]
            await kind.store.put(topic, bodies)
            model.update(bodies)
        elif step == "delete":
            await kind.store.delete(topic, asked)
            model = {name: body for name, body in model.items() if name not in asked}
        else:
            assert await kind.store.get(topic, asked) == [model.get(name) for name in asked]
    assert await kind.store.get(topic, names) == [model.get(name) for name in names]
    assert bool(await kind.remains(topic)) == bool(model)


# Redis


async def test_every_bucket_in_redis_has_an_end(server_url: str, topic: str) -> None:
    store = open_store(server_url, lifetime=60)
    bodies = [*bodies_of(b"1"), ("0ujtsYcgvSTl8PAuAdqWYSMnLOv", b"2")]
    await store.put(topic, bodies)
    await store.close()
    async with Redis.from_url(server_url) as redis:
        keys = await keys_of(server_url, topic)
        assert sorted(keys) == sorted(f"kl:bodies:{topic}:{name[:6]}" for name, _ in bodies)
        for key in keys:
            assert 0 < await redis.pttl(key) <= 60_000


async def test_parts_of_bodies_in_redis_have_an_end_too_and_that_is_put_off(
    server_url: str, topic: str
) -> None:
    store = open_store(server_url, lifetime=60)
    [streamed, large] = ksuid.take(2)
    async with Redis.from_url(server_url) as redis:

        async def parts() -> AsyncIterator[bytes]:
            yield bytes(2 * PART)
            yield bytes(PART)
            [unfinished] = [key async for key in redis.scan_iter(match=f"kl:bodies:{topic}:*")]
            assert 0 < await redis.pttl(unfinished) <= 600_000

        await store.write(topic, streamed, parts())
        await store.put(topic, [(large, bytes(17 * PART))])
        keys = [f"kl:bodies:{topic}:{{{name}}}" for name in (streamed, large)]
        assert sorted(await keys_of(server_url, topic)) == sorted(keys)
        for key, name in zip(keys, (streamed, large), strict=True):
            await redis.pexpire(key, 30_000)
            await store.keep(topic, [name])
            assert 30_000 < await redis.pttl(key) <= 60_000
    await store.close()


async def test_a_restart_of_the_server_is_sat_out(topic: str) -> None:
    bodies = bodies_of(b"1", b"2", b"3")
    names = [name for name, _ in bodies]
    with Server(appendonly=True, appendfsync="always") as server:
        store = open_store(server.url, lifetime=LIFETIME)
        await store.put(topic, bodies[:2])
        server.kill()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.put, topic, bodies[2:])
            await to_thread.run_sync(server.start)
        assert await store.get(topic, names) == [b"1", b"2", b"3"]
        await store.delete(topic, names)
        assert await keys_of(server.url, topic) == []
        await store.close()


async def test_a_connection_that_the_server_has_closed_is_made_again(server_url: str, topic: str) -> None:
    store = open_store(server_url, lifetime=LIFETIME)
    bodies = bodies_of(b"1")
    await store.put(topic, bodies)
    async with Redis.from_url(server_url) as redis:
        await redis.client_kill_filter(_type="normal", skipme=True)
    assert await store.get(topic, [bodies[0][0]]) == [b"1"]
    await store.close()


async def until_it_works(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while it answers that the store is away."""
    with anyio.fail_after(60):
        while True:
            try:
                return await call()
            except Unavailable:
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("waits", [True, False], ids=["with a connection", "without one"])
async def test_a_server_that_hangs_is_a_named_error_and_is_used_again_when_it_goes_on(
    waits: bool, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_ANSWER", "_CONNECT"):
        monkeypatch.setattr(f"keylane.payloads.redis.{limit}", 0.2)
    bodies = bodies_of(b"1")
    with single_server() as server:
        store = RedisStore(server.url, lifetime=LIFETIME, patience=0.1)
        if waits:
            await store.put(topic, bodies)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match="cannot be reached"):
                await store.put(topic, bodies)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await until_it_works(lambda: store.put(topic, bodies))
        assert await until_it_works(lambda: store.get(topic, [bodies[0][0]])) == [b"1"]
        await store.close()


async def test_a_call_that_is_cancelled_leaves_nothing_for_the_next_one(server_url: str, topic: str) -> None:
    store = open_store(server_url, lifetime=LIFETIME)
    bodies = bodies_of(b"1", b"2" * 1_000_000)
    await store.put(topic, bodies)
    for turns in range(6):
        reading = asyncio.create_task(store.get(topic, [bodies[1][0]]))
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        reading.cancel()
        await asyncio.wait([reading])
        assert await store.get(topic, [bodies[0][0]]) == [b"1"]
    await store.close()


async def test_a_full_server_is_overloaded_and_still_reads_and_deletes(topic: str) -> None:
    bodies = bodies_of(b"1")
    with single_server() as server:
        store = open_store(server.url, lifetime=LIFETIME)
        await store.put(topic, bodies)
        ask(server.port, "CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Overloaded, match="maxmemory") as raised:
            await store.put(topic, bodies_of(b"something quite private"))
        assert raised.value.retriable
        assert "private" not in str(raised.value)
        assert await store.get(topic, [bodies[0][0]]) == [b"1"]
        await store.delete(topic, [bodies[0][0]])
        assert await keys_of(server.url, topic) == []
        await store.close()


async def test_wrong_credentials_are_named_at_once_and_not_shown(topic: str) -> None:
    with single_server() as server:
        ask(server.port, "CONFIG", "SET", "requirepass", "right")
        address = server.url.removeprefix("redis://")
        for url in (f"redis://:wrong-secret@{address}", server.url):
            store = open_store(url, lifetime=LIFETIME)
            with pytest.raises(Unavailable, match=f"redis://{address} refuses") as raised:
                await store.put(topic, bodies_of(b"1"))
            assert "secret" not in str(raised.value)
            await store.close()
        store = open_store(f"redis://:right@{address}", lifetime=LIFETIME)
        await store.put(topic, bodies_of(b"1"))
        await store.close()


async def test_what_redis_refuses_is_a_named_error(server_url: str, topic: str) -> None:
    bodies = bodies_of(b"1")
    store = open_store(server_url, lifetime=LIFETIME)
    async with Redis.from_url(server_url) as redis:
        await redis.set(f"kl:bodies:{topic}:{bodies[0][0][:6]}", "not a hash")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await store.put(topic, bodies)
    await store.close()


@pytest.mark.slow
async def test_behind_sentinel_the_new_master_is_found(server_binary: Path, topic: str) -> None:
    bodies = bodies_of(b"1", b"2")
    with sentinel_pair(binary=server_binary) as pair:
        store = RedisStore(pair.url, lifetime=LIFETIME, patience=PATIENCE)
        await store.put(topic, bodies[:1])
        key = f"kl:bodies:{topic}:{bodies[0][0][:6]}"
        await until(lambda: ask(pair.replica.port, "HLEN", key) == "1")
        pair.master.kill()
        pair.fail_over()
        await store.put(topic, bodies[1:])
        assert await store.get(topic, [name for name, _ in bodies]) == [b"1", b"2"]
        assert "role:master" in ask(pair.replica.port, "INFO", "replication")
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_sync_waits_for_the_disks_and_is_refused_where_nothing_is_written_to_them(
    scheme: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a connection that has written nothing WAITAOF answers yes at once: ours must not."""
    monkeypatch.setattr("keylane.payloads.redis._SYNC_MS", 200)
    bodies = [*bodies_of(b"1"), ("0ujtsYcgvSTl8PAuAdqWYSMnLOv", b"2"), ("1ujtsYcgvSTl8PAuAdqWYSMnLOv", b"3")]
    names = [name for name, _ in bodies]
    with three_node_cluster() if scheme != "redis" else single_server() as servers:
        nodes = servers.nodes if isinstance(servers, Cluster) else (servers,)
        store = open_store(servers.url.replace("redis:", f"{scheme}:"), lifetime=CENTURY)
        await store.put(topic, bodies)
        with pytest.raises(InvalidArgument, match="appendonly"):
            await store.sync(topic, names)
        for node in nodes:
            ask(node.port, "CONFIG", "SET", "appendfsync", "no")
            ask(node.port, "CONFIG", "SET", "appendonly", "yes")
        await until(lambda: all("aof_rewrite_in_progress:0" in ask(node.port, "INFO") for node in nodes))
        with pytest.raises(DurabilityNotReached):
            await store.sync(topic, names)
        for node in nodes:
            ask(node.port, "CONFIG", "SET", "appendfsync", "always")
        await store.sync(topic, names)
        await store.close()


# Files


async def test_bodies_in_files_outlive_the_store(tmp_path: Path, topic: str) -> None:
    bodies = bodies_of(b"1", b"2")
    for store in (open_store(f"file://{tmp_path}", lifetime=LIFETIME) for _ in range(2)):
        await store.put(topic, bodies[:1])
        await store.close()
    store = open_store(f"file://{tmp_path}", lifetime=LIFETIME)
    assert await store.get(topic, [name for name, _ in bodies]) == [b"1", None]
    await store.close()


async def test_names_that_differ_in_case_only_have_files_that_differ_in_more(
    tmp_path: Path, topic: str
) -> None:
    store = open_store(f"file://{tmp_path}", lifetime=CENTURY)
    await store.put(topic, [("0ujtsYcgvSTl8PAuAdqWYSMnLOv", b"1"), ("0ujtsYcgvSTl8PAuAdqWYSMnLOV", b"2")])
    found = await to_thread.run_sync(files_of, tmp_path, topic)
    assert len({path.lower() for path in found}) == 4  # two files, their folder and the topic's
    await store.close()


async def test_what_has_outlived_its_lifetime_is_swept_away_unless_it_is_owed(
    tmp_path: Path, topic: str
) -> None:
    old, young = "0ujtsYcgvSTl8PAuAdqWYSMnLOv", ksuid.take(1)[0]
    root = tmp_path / "bodies"
    writer = open_store(f"file://{root}", lifetime=CENTURY)
    await writer.put(topic, [(old, b"old"), (young, b"young")])
    await writer.close()
    assert await writer.get(topic, [old, young]) == [b"old", b"young"]
    (root / topic / "notes").mkdir()  # not ours

    store = open_store(f"file://{root}", lifetime=LIFETIME)
    await store.tend(topic, lambda before: names_before(before, old), time.time())
    assert await store.get(topic, [old, young]) == [b"old", b"young"]
    await store.tend(topic, lambda before: names_before(before), time.time())
    await store.close()
    assert await store.get(topic, [old, young]) == [None, b"young"]
    assert len(os.listdir(root / topic)) == 2


async def names_before(before: str, *names: str) -> set[str]:
    """Which bodies are needed still."""
    assert all(name < before for name in names)
    return set(names)


async def test_a_folder_that_cannot_be_written_is_a_named_error(tmp_path: Path, topic: str) -> None:
    (tmp_path / "bodies").write_text("a file where a folder should be")
    store = open_store(f"file://{tmp_path}/bodies", lifetime=LIFETIME)
    with pytest.raises(Unavailable, match=rf"payload store file://{tmp_path}/bodies cannot be used"):
        await store.put(topic, bodies_of(b"1"))
    await store.close()


async def test_a_full_disk_is_overloaded(topic: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    store = open_store(f"file://{tmp_path}", lifetime=LIFETIME)
    with pytest.raises(Overloaded, match="is full"):
        await store.put(topic, bodies_of(b"1"))
    await store.close()
