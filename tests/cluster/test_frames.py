"""What a worker answers about partitions of others, what it pushes when they move, and permits in parts."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import move, owners, served, settled, state_of
from tests.support.peer import PATIENCE, Elsewhere, Item, Peer, Refused, Stream, messages, publish, receipts
from tests.support.running import RunningBroker

PARTITIONS = 6

pytestmark = pytest.mark.slow  # three workers


@pytest.fixture
async def placed(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> AsyncIterator[dict[int, str]]:
    """A topic with a subscription, and the owner of each of its partitions."""
    peer = peers[three.ids[0]]
    await peer.answer(wire.CreateTopic(topic, PARTITIONS))
    await peer.answer(wire.CreateSubscription(topic, "s"))
    await settled(engine, *three.ids)
    yield {number: name for (of, number), name in (await owners(engine)).items() if of == topic}
    await peer.answer(wire.DeleteTopic(topic))


def address(broker: RunningBroker, worker: str) -> str:
    """Where a worker listens."""
    return broker.urls[broker.ids.index(worker)].removeprefix("keylane://")


def others(broker: RunningBroker, worker: str) -> list[str]:
    """All workers but one."""
    return [name for name in broker.ids if name != worker]


@pytest.mark.slow
async def test_any_worker_tells_the_map_of_a_topic(
    three: RunningBroker, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    for peer in peers.values():
        info = await peer.ask(wire.Info(topic=topic), wire.InfoReply)
        assert {info.workers[place].id for place in info.owners} == set(three.ids)
        assert [info.workers[place].id for place in info.owners] == [placed[n] for n in range(PARTITIONS)]
        assert {known.id: known.address for known in info.workers} == {
            name: address(three, name) for name in three.ids
        }


async def test_the_map_of_no_topic_is_a_named_error(peers: dict[str, Peer]) -> None:
    for peer in peers.values():
        with pytest.raises(Refused, match="topic_not_found"):
            await peer.ask(wire.Info(topic="nowhere"), wire.InfoReply)
        await peer.echo()


@pytest.mark.slow
async def test_a_publish_to_a_worker_without_the_partition_is_redirected_and_changes_nothing(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    for partition, owner in placed.items():
        before = await state_of(engine, topic, partition)
        for other in others(three, owner):
            with pytest.raises(Elsewhere) as caught:
                await publish(peers[other], topic, partition, "u")
            assert caught.value.said == wire.Redirect(topic, partition, address(three, owner))
        assert await state_of(engine, topic, partition) == before
        assert (await publish(peers[owner], topic, partition, "u")).first == 1


async def test_what_comes_behind_a_redirected_publish_is_refused_until_it_comes_again(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner = placed[0]
    other = others(three, owner)[0]
    with pytest.raises(Elsewhere):
        await publish(peers[other], topic, 0, "u1")
    await move(peers[owner], topic, 0, other)
    await served(engine, topic, 0, other)
    # Not to where it was: whoever follows that would be sent to and fro for ever.
    with pytest.raises(Refused, match=r"fenced: .*again"):
        await publish(peers[other], topic, 0, "u2")
    await publish(peers[other], topic, 0, "u1", again=True)
    await publish(peers[other], topic, 0, "u2")
    log = (await state_of(engine, topic, 0)).log
    assert len(log) == 2


async def test_what_comes_behind_a_redirected_publish_is_told_where_the_partition_is_by_now(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner = placed[0]
    other, third = others(three, owner)
    with pytest.raises(Elsewhere):
        await publish(peers[other], topic, 0, "u1")
    await move(peers[owner], topic, 0, third)
    await served(engine, topic, 0, third)
    await peers[other].ask(wire.Info(topic=topic), wire.InfoReply)
    async with asyncio.timeout(PATIENCE):
        while True:  # until it has heard of the move
            with pytest.raises(Elsewhere) as caught:
                await publish(peers[other], topic, 0, "u2")
            if caught.value.said.address == address(three, third):
                break


@pytest.mark.parametrize("kind", [wire.Ack, wire.Nack, wire.Extend])
async def test_settling_in_a_partition_that_the_stream_has_never_opened_is_an_error_for_good(
    three: RunningBroker,
    peers: dict[str, Peer],
    topic: str,
    placed: dict[int, str],
    kind: type[wire.Ack] | type[wire.Nack] | type[wire.Extend],
) -> None:
    """Also of one that is served elsewhere, or is not there at all: asking again is of no use."""
    owner = placed[0]
    stream = Stream(peers[owner], topic, "s", "c")
    await stream.open(0)
    own = next(number for number, name in placed.items() if name == owner and number)
    foreign = next(number for number, name in placed.items() if name != owner)
    for number in (own, foreign, PARTITIONS, 9_999, 10_000, -1):
        request = (
            kind(stream.number, number, lease_ms=1) if kind is wire.Extend else kind(stream.number, number)
        )
        with pytest.raises(Refused, match=f"invalid_argument: .*partition {number}"):
            await peers[owner].answer(request, wire.pack(["", 1, 1, 1]))


async def test_a_subscribe_that_names_a_partition_of_another_worker_opens_nothing(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    for worker, peer in peers.items():
        foreign = next(number for number, owner in placed.items() if owner != worker)
        own = next(number for number, owner in placed.items() if owner == worker)
        stream = Stream(peer, topic, "s", "c")
        for numbers in ([foreign], [own, foreign], []):
            with pytest.raises(Elsewhere) as caught:
                await stream.open(*numbers)
            assert caught.value.said.address == address(three, placed[caught.value.said.partition])
            assert placed[caught.value.said.partition] != worker
        for number in range(PARTITIONS):
            assert (await state_of(engine, topic, number)).subscriptions[0].consumers == {}
        with pytest.raises(Refused, match="stream"):
            await stream.ack(Item(own, 1, "k", "u", 1, 0, False))


@pytest.mark.parametrize("kind", [wire.Ack, wire.Nack, wire.Extend])
async def test_settling_with_a_worker_that_lost_the_partition_is_redirected_and_changes_nothing(
    three: RunningBroker,
    engine: Engine,
    peers: dict[str, Peer],
    topic: str,
    placed: dict[int, str],
    kind: type[wire.Ack] | type[wire.Nack] | type[wire.Extend],
) -> None:
    owner = placed[0]
    kept = next(number for number, name in placed.items() if name == owner and number)
    other = others(three, owner)[0]
    stream = Stream(peers[owner], topic, "s", "c")
    await stream.open(0, kept)
    await publish(peers[owner], topic, 0, "u")
    [item] = await stream.receive(1)
    await move(peers[owner], topic, 0, other)
    pushed = await peers[owner].push(wire.Redirect)
    assert pushed == wire.Redirect(topic, 0, address(three, other), stream.number, permits=1)
    await served(engine, topic, 0, other)
    before = await state_of(engine, topic, 0)
    request = kind(stream.number, 0, lease_ms=1_000) if kind is wire.Extend else kind(stream.number, 0)
    with pytest.raises(Elsewhere) as caught:
        await peers[owner].answer(request, receipts("shared", item))
    assert caught.value.said == wire.Redirect(topic, 0, address(three, other))
    assert await state_of(engine, topic, 0) == before
    # With the new owner it can be settled, once the consumer is there.
    there = Stream(peers[other], topic, "s", "c")
    assert (await there.open(0)).held == 1
    [held] = await there.receive(1)
    assert held == item._replace(held=True)
    assert (await there.ack(held)).stale == []


async def test_moves_are_told_to_those_who_asked_for_the_map_and_to_nobody_else(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    curious, indifferent = list(peers.values())[:2]
    await curious.ask(wire.Info(topic=topic), wire.InfoReply)
    target = others(three, placed[0])[0]
    await move(peers[three.ids[2]], topic, 0, target)
    assert (await curious.push(wire.Moved)).topic == topic
    info = await curious.ask(wire.Info(topic=topic), wire.InfoReply)
    assert info.workers[info.owners[0]].id == target, "who is told finds the new map"
    await served(engine, topic, 0, target)
    await indifferent.echo()
    assert not indifferent.has(wire.Moved)


async def test_a_subscribe_on_an_open_stream_adds_partitions_to_it(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner = three.ids[0]
    peer = peers[owner]
    first, second = [number for number, name in placed.items() if name == owner][:2]
    stream = Stream(peer, topic, "s", "c")
    await stream.open(first)
    await publish(peer, topic, second, "early")
    assert await stream.waiting() == []
    await stream.open(second)
    [early] = await stream.receive(1)
    assert (early.partition, early.uid) == (second, "early")
    await publish(peer, topic, first, "late")
    [late] = await stream.receive(1)
    assert (late.partition, late.uid) == (first, "late")
    assert (await stream.ack(early)).stale == (await stream.ack(late)).stale == []
    assert (await stream.open(first, second)).held == 0, "adding again what is there changes nothing"
    with pytest.raises(Refused, match="in use"):
        await peer.answer(wire.Subscribe(stream.number, topic, "s", "d", partitions=[first]))
    third = next(number for number, name in placed.items() if name != owner)
    with pytest.raises(Elsewhere):
        await stream.open(third)
    await publish(peer, topic, first, "later")
    assert [item.uid for item in await stream.receive(1)] == ["later"], "the stream lives on"


async def test_without_permits_nothing_comes_and_one_wish_is_pushed(
    peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    peer = peers[placed[0]]
    stream = Stream(peer, topic, "s", "c")
    await stream.open(0, permits=0)
    await publish(peer, topic, 0, "u1")
    assert (await peer.push(wire.Flow)) == wire.Flow(stream.number, wanted=True)
    await publish(peer, topic, 0, "u2")
    assert await stream.waiting() == []
    assert not peer.has(wire.Flow), "it was said once"
    peer.send(wire.Flow(stream.number, limit=1))
    [one] = await stream.receive(1)
    assert await stream.waiting() == []
    await stream.ack(one)
    [two] = await stream.receive(1)
    assert [one.uid, two.uid] == ["u1", "u2"]
    await stream.ack(two)
    await peer.answer(wire.Flow(stream.number, limit=0))
    await publish(peer, topic, 0, "u3")
    assert (await peer.push(wire.Flow)).wanted, "with another limit it is said again"


async def test_a_lower_limit_is_answered_once_no_more_is_out(
    peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    peer = peers[placed[0]]
    stream = Stream(peer, topic, "s", "c")
    await stream.open(0, permits=10)
    await publish(peer, topic, 0, *(f"u{number}" for number in range(20)))
    held = await stream.receive(10)
    lowered = peer.begin(wire.Flow(stream.number, limit=3))
    for item in held[:6]:
        await stream.ack(item)
        await peer.echo()
        assert not lowered.done(), "four or more are out"
    assert await stream.waiting() == [], "nothing comes above the limit"
    await stream.ack(held[6])
    await asyncio.wait_for(lowered, PATIENCE)
    assert await stream.waiting() == [], "three are out, and three may be"
    await stream.ack(*held[7:])
    assert len(await stream.receive(3)) == 3
    assert await stream.waiting() == []
    raised = peer.begin(wire.Flow(stream.number, limit=5))
    await asyncio.wait_for(raised, PATIENCE)
    assert len(await stream.receive(2)) == 2
    assert await stream.waiting() == []


async def test_a_lower_limit_is_answered_too_when_what_is_out_moves_or_the_consumer_ends(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner = placed[0]
    peer = peers[owner]
    stream = Stream(peer, topic, "s", "c")
    await stream.open(0, permits=10)
    await publish(peer, topic, 0, "u1", "u2")
    await stream.receive(2)
    target = others(three, owner)[0]
    await move(peer, topic, 0, target)
    await peer.push(wire.Redirect)
    lowered = peer.begin(wire.Flow(stream.number, limit=0))
    peer.send(wire.Flow(stream.number, permits=2))  # they are with the other worker now
    await asyncio.wait_for(lowered, PATIENCE)
    there = Stream(peers[target], topic, "s", "c")
    await there.open(0, permits=10)
    lowered = peers[target].begin(wire.Flow(there.number, limit=0))
    await peers[target].echo()
    assert not lowered.done(), "what it still holds counts"
    await peers[target].answer(wire.Unsubscribe(there.number))
    await asyncio.wait_for(lowered, PATIENCE)


async def test_one_stream_on_all_partitions_of_a_worker_never_has_more_than_its_permits(
    three: RunningBroker, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner = three.ids[1]
    peer = peers[owner]
    own = [number for number, name in placed.items() if name == owner]
    stream = Stream(peer, topic, "s", "c")
    await stream.open(*own, permits=4)
    for number in own:
        await publish(peer, topic, number, *(f"{number}-{place}" for place in range(10)))
    got: list[str] = []
    while len(got) < 10 * len(own):
        assert len(await stream.waiting()) <= 4
        [item] = await stream.receive(1)
        assert (await stream.ack(item)).stale == []
        got.append(item.uid)
    assert sorted(got) == sorted(f"{number}-{place}" for number in own for place in range(10))


async def test_publishes_sent_while_the_partition_moves_are_stored_or_redirected_never_both(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, placed: dict[int, str]
) -> None:
    owner, target = placed[0], others(three, placed[0])[0]
    peer = peers[owner]
    answers = []
    for number in range(200):
        answers.append(peer.begin(wire.Publish(topic, 0), messages(f"u{number}")))
        if number == 100:
            moved = peer.begin(wire.MovePartition(topic, 0, target))
        if number % 10 == 0:
            await peer.echo()
    await moved
    await served(engine, topic, 0, target)
    stored = [number for number, answer in enumerate(answers) if (await answer).type == wire.Type.OK]
    others_said = {(await answer).type for answer in answers} - {wire.Type.OK}
    assert others_said <= {wire.Type.REDIRECT, wire.Type.ERROR}
    assert stored == list(range(len(stored))), "what is refused is a tail: order is kept"
    assert len((await state_of(engine, topic, 0)).log) == len(stored)
