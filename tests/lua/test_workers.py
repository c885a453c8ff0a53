"""The workers as Redis knows them: heartbeats, draining, the controller, owners, and announcements."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from keylane.errors import InvalidArgument, InvalidName
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Owners, TopicSettings, WorkerReport
from keylane_broker.store.keys import CONTROLLER, OWNERS, TOPICS, WORKERS, topic_key, worker_key
from tests.support.clock import ManualTime

MINUTE_MS = 60_000


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """The same, without what another test left."""
    await forget_all(engine)
    return engine


@pytest.fixture
async def timed(timed: ManualTime) -> ManualTime:
    """The same, without what another test left."""
    await forget_all(timed.engine)
    return timed


async def forget_all(engine: Engine) -> None:
    """Remove every key of a cluster of workers."""
    for key in (WORKERS, CONTROLLER, OWNERS, TOPICS, *await engine.store.keys_like(worker_key("*"))):
        await engine.store.command("DEL", key)


def report(id: str = "w1", state: str = "serving") -> WorkerReport:
    """What a worker says of itself."""
    load = {"orders:3": (12.5, 0.25), "bills:0": (1.0, 0.0)}
    return WorkerReport(id, "10.0.0.1:4440", "1.2.3", state, 17, 13.5, 0.25, load)


async def states(engine: Engine) -> dict[str, str]:
    """The states of all workers."""
    return {report.id: report.state for report in await engine.workers()}


# Workers


async def test_a_worker_is_known_by_what_it_says_and_when(timed: ManualTime) -> None:
    engine = timed.engine
    assert await engine.workers() == []
    await engine.enlist(report("w2"), MINUTE_MS)
    await timed.advance(7)
    await engine.enlist(report("w1"), MINUTE_MS)
    first, second = await engine.workers()
    assert (first.id, first.heartbeat_ms, first.age_ms) == ("w1", timed.now_ms, 0)
    assert (second.id, second.heartbeat_ms, second.age_ms) == ("w2", timed.now_ms - 7, 7)
    assert first.load == report().load
    assert (first.address, first.release, first.state) == ("10.0.0.1:4440", "1.2.3", "serving")
    assert (first.started_ms, first.messages, first.script_ms) == (17, 13.5, 0.25)
    await engine.heartbeat(report("w2", "stopping"), MINUTE_MS)
    assert [report.age_ms for report in await engine.workers()] == [0, 0]
    assert await states(engine) == {"w1": "serving", "w2": "stopping"}


async def test_what_a_worker_says_is_forgotten_in_time_and_its_name_is_lost(engine: Engine) -> None:
    await engine.enlist(report(), MINUTE_MS)
    assert 0 < await engine.store.command("PTTL", worker_key("w1")) <= MINUTE_MS
    await engine.heartbeat(report(), 1)
    with anyio.fail_after(60):
        while await engine.store.command("EXISTS", worker_key("w1")):  # noqa: ASYNC110
            await anyio.sleep(0.005)
    [lost] = await engine.workers()
    assert (lost.id, lost.state, lost.address, lost.load) == ("w1", "lost", "", {})
    assert lost.heartbeat_ms > 0


async def test_draining_survives_heartbeats_and_ends_with_the_order_or_the_process(engine: Engine) -> None:
    await engine.enlist(report(), MINUTE_MS)
    await engine.drain("w1", True)
    await engine.heartbeat(report(), MINUTE_MS)
    assert await states(engine) == {"w1": "draining"}
    await engine.heartbeat(report(state="stopping"), MINUTE_MS)
    assert await states(engine) == {"w1": "stopping"}
    await engine.heartbeat(report(), MINUTE_MS)
    await engine.drain("w1", False)
    assert await states(engine) == {"w1": "serving"}
    await engine.drain("w1", True)
    await engine.enlist(report(), MINUTE_MS)
    assert await states(engine) == {"w1": "serving"}


async def test_a_worker_that_is_not_there_cannot_be_drained_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match="no worker 'w1'; there are none"):
        await engine.drain("w1", True)
    await engine.enlist(report("worker-1"), MINUTE_MS)
    await engine.enlist(report("other"), MINUTE_MS)
    with pytest.raises(
        InvalidArgument,
        match=r"no worker 'worker-2'; did you mean 'worker-1'\?; there are other, worker-1",
    ):
        await engine.drain("worker-2", True)
    assert await engine.store.keys_like(worker_key("worker-2")) == set()


async def test_a_worker_that_departs_is_forgotten_and_no_controller_any_more(engine: Engine) -> None:
    await engine.enlist(report("w1"), MINUTE_MS)
    await engine.enlist(report("w2"), MINUTE_MS)
    assert await engine.lead("w1", MINUTE_MS) == ("w1", MINUTE_MS)
    await engine.depart("w2")
    assert (await engine.lead("w2", MINUTE_MS))[0] == "w1"
    await engine.depart("w1")
    assert await engine.workers() == []
    assert await engine.store.keys_like(worker_key("*")) == set()
    assert await engine.lead("w2", MINUTE_MS) == ("w2", MINUTE_MS)


async def test_only_a_worker_that_was_not_heard_of_since_is_dismissed(timed: ManualTime) -> None:
    engine = timed.engine
    await engine.enlist(report(), MINUTE_MS)
    [seen] = await engine.workers()
    await timed.advance(1)
    await engine.heartbeat(report(), MINUTE_MS)
    assert not await engine.dismiss("w1", seen.heartbeat_ms)
    assert await states(engine) == {"w1": "serving"}
    assert await engine.dismiss("w1", seen.heartbeat_ms + 1)
    assert not await engine.dismiss("w1", seen.heartbeat_ms + 1)
    assert await engine.workers() == []
    assert await engine.store.keys_like(worker_key("*")) == set()


async def test_names_are_checked(engine: Engine) -> None:
    for call in (
        engine.enlist(report("a b"), 1),
        engine.heartbeat(report(""), 1),
        engine.depart("#"),
        engine.dismiss("-", 1),
        engine.drain("é", True),
        engine.lead("", 1),
        engine.assign(0, {"#": ["w1"]}),
        engine.assign(0, {"orders": ["w1 w2"]}),
    ):
        with pytest.raises(InvalidName):
            await call
    for call in (engine.heartbeat(report(), 0), engine.lead("w1", 0), engine.assign(-1, {})):
        with pytest.raises(InvalidArgument):
            await call
    for key in (WORKERS, CONTROLLER, OWNERS):
        assert await engine.store.keys_like(key) == set()


# The controller


async def test_one_worker_at_a_time_is_the_controller(engine: Engine) -> None:
    assert await engine.lead("w1", MINUTE_MS) == ("w1", MINUTE_MS)
    holder, left_ms = await engine.lead("w2", MINUTE_MS)
    assert holder == "w1"
    assert 0 < left_ms <= MINUTE_MS
    assert await engine.lead("w1", 2 * MINUTE_MS) == ("w1", 2 * MINUTE_MS)
    assert (await engine.lead("w2", 2 * MINUTE_MS))[1] > MINUTE_MS
    assert await engine.lead("w2", MINUTE_MS) == ("w1", MINUTE_MS), "for no longer than leading lasts"
    await engine.lead("w1", 1)
    with anyio.fail_after(60):
        while (await engine.lead("w2", MINUTE_MS))[0] != "w2":  # noqa: ASYNC110
            await anyio.sleep(0.005)


# Owners


async def test_owners_are_changed_by_whoever_knows_the_newest_version(engine: Engine) -> None:
    assert await engine.owners() == Owners(0, {})
    assert await engine.assign(0, {"orders": ["w1", "", "w2"], "bills": ["w1"]})
    assert await engine.owners() == Owners(1, {"orders": ["w1", "", "w2"], "bills": ["w1"]})
    assert not await engine.assign(0, {"orders": ["w3", "w3", "w3"]})
    assert not await engine.assign(2, {"orders": ["w3", "w3", "w3"]})
    assert await engine.assign(1, {"orders": ["w2", "w2", "w2"], "bills": None, "none": None})
    assert await engine.owners() == Owners(2, {"orders": ["w2", "w2", "w2"]})
    assert await engine.assign(2, {})
    assert (await engine.owners()).version == 3


async def test_many_topics_with_many_partitions_are_assigned_at_once(engine: Engine) -> None:
    changes: dict[str, list[str] | None] = {
        f"topic-{number}": [f"worker-{partition % 7}" for partition in range(100)] for number in range(100)
    }
    assert await engine.assign(0, changes)
    assert (await engine.owners()).topics == changes


async def test_the_partitions_of_all_topics_that_are_ready_are_counted(
    engine: Engine, make_topic_name: Callable[[], str]
) -> None:
    assert await engine.partition_counts() == {}
    names = [make_topic_name() for _ in range(3)]
    for count, name in enumerate(names, 1):
        await engine.create_topic(name, TopicSettings(partitions=count))
    await engine.store.command("HSET", topic_key(names[0]), "state", "deleting")
    assert await engine.partition_counts() == {names[1]: 2, names[2]: 3}
    for name in names:
        await engine.delete_topic(name)


# Announcements


@asynccontextmanager
async def listening(engine: Engine) -> AsyncIterator["asyncio.Queue[str]"]:
    """What is heard, for the length of a test."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(engine.listen(heard.put_nowait))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_announcements_are_heard_by_all_in_their_order(engine: Engine) -> None:
    with anyio.fail_after(60):
        async with listening(engine) as one, listening(engine) as other:
            assert (await one.get(), await other.get()) == ("", "")
            for event in ("owners", "subscription orders billing"):
                await engine.announce(event)
            for heard in (one, other):
                assert await heard.get() == "owners"
                assert await heard.get() == "subscription orders billing"
                assert heard.empty()
        await engine.announce("to nobody")
