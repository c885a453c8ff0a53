"""An order given to one worker acts at once on the consumers of all others."""

from collections.abc import AsyncIterator

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import owners, settled
from tests.support.peer import Elsewhere, Peer, Refused, Stream, publish
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out

PARTITIONS = 3


@pytest.fixture
async def streams(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> AsyncIterator[list[Stream]]:
    """A consumer of one subscription with each worker; the place in the list is the partition that it has."""
    first = peers[three.ids[0]]
    await first.answer(wire.CreateTopic(topic, PARTITIONS))
    await first.answer(wire.CreateSubscription(topic, "s"))
    await settled(engine, *three.ids)
    placed = await owners(engine)
    found = []
    for number in range(PARTITIONS):
        stream = Stream(peers[placed[topic, number]], topic, "s", f"c{number}")
        await stream.open(number, permits=100)
        found.append(stream)
    yield found
    if topic in await first.ask_body(wire.Topics(), list[str]):
        await first.answer(wire.DeleteTopic(topic))


async def each_gets(streams: list[Stream], topic: str, uid: str) -> None:
    """Publish to each partition, and see that it comes."""
    for number, stream in enumerate(streams):
        await publish(stream.peer, topic, number, f"{uid}-{number}")
        assert [item.uid for item in await stream.receive(1)] == [f"{uid}-{number}"]


async def test_a_subscription_is_paused_and_resumed_on_all_workers(
    three: RunningBroker, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    for turn, peer in enumerate(peers.values()):
        await each_gets(streams, topic, f"before-{turn}")
        await peer.answer(wire.ChangeSubscription(topic, "s", paused=True))
        for number, stream in enumerate(streams):
            await publish(stream.peer, topic, number, f"paused-{turn}")
        for stream in streams:
            assert await stream.waiting() == []
        await peer.answer(wire.ChangeSubscription(topic, "s", paused=False))
        for stream in streams:
            assert [item.uid for item in await stream.receive(1)] == [f"paused-{turn}"]


async def test_a_seek_takes_back_what_all_workers_have_delivered(
    three: RunningBroker, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    await peers[three.ids[0]].answer(wire.CreateSubscription(topic, "keeps"))  # so the entries stay
    for turn, peer in enumerate(peers.values()):
        for number, stream in enumerate(streams):
            await publish(stream.peer, topic, number, f"u{turn}")
            items = await stream.receive(1)
            await stream.ack(*items)
            assert items[0].uid == f"u{turn}"
        await peer.answer(wire.Seek(topic, "s", "earliest"))
        for stream in streams:
            again = await stream.receive(turn + 1)
            assert [item.uid for item in again] == [f"u{place}" for place in range(turn + 1)]
            await stream.ack(*again)


async def test_a_deleted_subscription_ends_its_consumers_on_all_workers(
    three: RunningBroker, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    await each_gets(streams, topic, "u")
    await peers[three.ids[1]].answer(wire.DeleteSubscription(topic, "s"))
    for stream in streams:
        said = await stream.peer.push(wire.Error)
        assert (said.code, said.stream) == ("subscription_not_found", stream.number)
        with pytest.raises(Refused):
            await stream.peer.answer(wire.Unsubscribe(stream.number))


async def test_a_deleted_topic_ends_its_consumers_on_all_workers_and_takes_no_more(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    await each_gets(streams, topic, "u")
    for peer in peers.values():
        await peer.ask(wire.Info(topic=topic), wire.InfoReply)
    await peers[three.ids[2]].answer(wire.DeleteTopic(topic))
    for number, stream in enumerate(streams):
        with pytest.raises(Refused, match="topic_not_found"):
            await publish(stream.peer, topic, number, "late")
        said = await stream.peer.push(wire.Error)
        assert (said.code, said.stream) == ("topic_not_found", stream.number)
    for peer in peers.values():
        assert (await peer.push(wire.Moved)).topic == topic, "those who know the map are told"
        with pytest.raises(Refused, match="topic_not_found"):
            await peer.ask(wire.Info(topic=topic), wire.InfoReply)

    async def nothing_left() -> bool:
        return not await engine.store.keys_like(f"kl:*{topic}*")

    await until(nothing_left)


async def test_a_topic_made_again_at_once_is_another_topic_on_all_workers(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    await each_gets(streams, topic, "u")
    peer = peers[three.ids[0]]
    await peer.answer(wire.DeleteTopic(topic))
    await peer.answer(wire.CreateTopic(topic, PARTITIONS))
    await peer.answer(wire.CreateSubscription(topic, "s"))
    for stream in streams:  # each worker learns of the end of the old topic and of the new one on its own
        said = await stream.peer.push(wire.Error)
        assert said.stream == stream.number
        assert said.code in ("topic_not_found", "topic_replaced", "subscription_not_found", "unavailable")
    for number in range(PARTITIONS):

        async def taken(number: int = number) -> bool:
            owner = (await owners(engine)).get((topic, number), "")
            try:
                return (await publish(peers[owner], topic, number, "u", again=True)).first == 1
            except (Elsewhere, Refused, KeyError):
                return False

        await until(taken)


async def test_a_subscription_made_at_one_worker_is_there_for_all(
    three: RunningBroker, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    await peers[three.ids[0]].answer(wire.CreateSubscription(topic, "new"))
    for number, stream in enumerate(streams):
        other = Stream(stream.peer, topic, "new", "n")
        await other.open(number)
        await publish(stream.peer, topic, number, "u")
        assert [item.uid for item in await other.receive(1)] == ["u"]
    for peer in peers.values():
        said = await peer.ask(wire.DescribeSubscription(topic, "new"), wire.SubscriptionReply)
        assert (said.leased, said.consumers) == (PARTITIONS, ["n"])


async def test_an_exclusive_subscription_has_one_consumer_whatever_worker_is_asked(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, streams: list[Stream]
) -> None:
    placed = await owners(engine)
    await peers[three.ids[0]].answer(wire.CreateSubscription(topic, "alone", "exclusive"))
    for number in range(PARTITIONS):
        stream = Stream(peers[placed[topic, number]], topic, "alone", "one")
        await stream.open(number, mode="exclusive")
    for number in range(PARTITIONS):
        stream = Stream(peers[placed[topic, number]], topic, "alone", "two")
        with pytest.raises(Refused, match="subscription_busy"):
            await stream.open(number, mode="exclusive")
