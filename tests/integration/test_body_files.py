"""Bodies in files: whose clock counts, what a full disk does, and what `fsync` syncs."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from keylane import AsyncClient, InvalidArgument, Overloaded, PayloadStore, ksuid
from keylane.payloads import files, open_store
from tests.support.running import RunningBroker

DAY = 86_400.0
SOON = 60.0  # seconds
OLD = "0ujtsYcgvSTl8PAuAdqWYSMnLOv"  # a name of 2017

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bodies")


@pytest.fixture(scope="module")
def broker(folder: Path) -> Iterator[RunningBroker]:
    """A broker that advertises files."""
    with RunningBroker(payloads=f"file://{folder}") as broker:
        yield broker


def names_in(folder: Path) -> set[str]:
    """The names of all files."""
    return {name for _, _, files in os.walk(folder) for name in files}


def file_of(name: str) -> str:
    return ksuid.raw(name).hex()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What sets the clock of this process, and not the broker's; afterwards names are of today again."""
    yield monkeypatch
    monkeypatch.undo()
    ksuid._start_afresh()


def set_clock(ahead: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    ahead.setattr(time, "time", lambda: real() + seconds)
    ahead.setattr(files, "_now", time.time)
    ksuid._start_afresh()  # as if the process had begun like that


# Clocks


async def test_a_client_whose_clock_is_ahead_sweeps_no_body_that_is_on_its_way(
    broker: RunningBroker, folder: Path, topic: str, ahead: pytest.MonkeyPatch
) -> None:
    [on_its_way] = ksuid.take(1)
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s")
        for number in range(50):
            await client.publish(topic, b"unread", key=str(number))
        await client._bodies.put(topic, [(on_its_way, b"stored, and about to be published")])
        set_clock(ahead, 8 * DAY)
        async with AsyncClient(broker.url) as other:
            await other.publish(topic, b"by another clock")
            await other._bodies.finish()
    assert len(names_in(folder / topic)) == 52
    assert file_of(on_its_way) in names_in(folder / topic)


@pytest.mark.parametrize("days", [-8, 8])
async def test_names_are_of_the_clusters_time(
    broker: RunningBroker, topic: str, days: int, ahead: pytest.MonkeyPatch
) -> None:
    now = time.time()
    set_clock(ahead, days * DAY)
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        published = await client.publish(topic, b"x")
        assert abs(ksuid.time_of(published.uid) - now) < 60
        bare = await client.publish(topic)
        assert abs(ksuid.time_of(bare.uid) - now) < 60


async def test_a_clock_that_is_set_while_a_client_runs_changes_no_names(
    broker: RunningBroker, topic: str, ahead: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        now = time.time()
        for days in (8, -16):
            set_clock(ahead, days * DAY)
            published = await client.publish(topic, b"x")
            assert abs(ksuid.time_of(published.uid) - now) < 60


async def nothing_owed(before: str) -> set[str]:
    return set()


@pytest.mark.parametrize("days", [-8, 8])
async def test_nothing_is_swept_while_two_clocks_differ_by_much(
    days: int, tmp_path: Path, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them is wrong, and nobody knows which."""
    store = open_store(f"file://{tmp_path}", lifetime=3_600.0)
    await store.put(topic, [(OLD, b"old")])
    await store.tend(topic, nothing_owed, time.time() + days * DAY)
    assert names_in(tmp_path) == {file_of(OLD)}
    assert "clock" in caplog.text
    await store.tend(topic, nothing_owed, time.time())
    assert names_in(tmp_path) == set()
    await store.close()


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "keylane-test", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(path: Path) -> None:
    """Let a file take all the room that is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, b"x" * 4_096)
    except OSError:
        os.close(descriptor)


@pytest.mark.slow
async def test_a_full_disk_keeps_no_parts_of_files_and_sweeps_what_is_left_over(
    broker: RunningBroker, small_disk: Path, topic: str
) -> None:
    store = f"file://{small_disk}"
    async with AsyncClient(broker.url, payloads=store) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        fill(small_disk / topic / file_of(OLD)[:6] / file_of(OLD))  # of a publish that nobody finished
        async with asyncio.timeout(SOON):
            published = await client.publish(topic, b"x" * 20_000)
        assert names_in(small_disk) == {file_of(published.uid)}

        fill(small_disk / "filler")
        async with AsyncClient(broker.url, payloads=store, timeout=2.0) as hasty:
            for _ in range(3):
                with pytest.raises(Overloaded, match="is full"):
                    await hasty.publish(topic, b"x" * 20_000)
        assert names_in(small_disk) == {file_of(published.uid), "filler"}
        (small_disk / "filler").unlink()
        async with asyncio.timeout(SOON):
            await client.publish(topic, b"x" * 20_000)


# fsync


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, broker: RunningBroker) -> list[tuple[str, int]]:
    """The path of each fsync, and how many messages the topics of this broker had just then."""
    found: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        with Redis.from_url(broker.redis_url) as redis:
            stored = sum(redis.xlen(key) for key in redis.keys("kl:*:log"))
        found.append((os.readlink(f"/proc/self/fd/{descriptor}"), stored))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


async def test_fsync_syncs_the_file_and_its_folders_before_the_message_is_published(
    broker: RunningBroker, folder: Path, topic: str, synced: list[tuple[str, int]]
) -> None:
    with Redis.from_url(broker.redis_url) as redis:
        before = sum(redis.xlen(key) for key in redis.keys("kl:*:log"))
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await client.publish(topic, b"not asked for", durability="memory")
        assert synced == []
        published = await client.publish(topic, b"x", durability="fsync")
    name = file_of(published.uid)
    place = folder / topic / name[:6]
    needed = {str(place / name), str(place), str(folder / topic), str(folder)}
    assert needed <= {path for path, _ in synced}
    assert {stored for _, stored in synced} == {before + 1}


class Shelf(PayloadStore):
    """A store of the application's own that knows nothing of disks."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}

    async def put(self, topic, bodies):  # type: ignore[no-untyped-def]
        self.bodies.update(bodies)

    async def get(self, topic, names):  # type: ignore[no-untyped-def]
        return [self.bodies.get(name) for name in names]

    async def delete(self, topic, names):  # type: ignore[no-untyped-def]
        for name in names:
            self.bodies.pop(name, None)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("store", ["memory://bodies", "own"])
async def test_fsync_is_refused_at_once_where_a_store_cannot_promise_it(
    broker: RunningBroker, topic: str, store: str
) -> None:
    async with AsyncClient(broker.url, payloads=Shelf() if store == "own" else store) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        async with asyncio.timeout(SOON):
            with pytest.raises(InvalidArgument, match="fsync"):
                await client.publish(topic, b"x", durability="fsync")
        assert (await client.publish(topic, durability="fsync")).durability == "fsync"
        await client.publish(topic, b"x")
        assert (await client.describe_subscription(topic, "s")).backlog == 2
