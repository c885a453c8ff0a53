"""Several requests in one frame, and several answers: each part is done, refused and answered by itself."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from keylane import AsyncClient, wire
from keylane.errors import ProtocolError
from keylane.wire import Frame, Type
from tests.support.peer import Peer, Refused, Stream, checked, connect, messages, publish, receipts
from tests.support.running import RunningBroker

PARTITIONS = 4


@pytest.fixture
async def peer(broker: RunningBroker, topic: str) -> AsyncIterator[Peer]:
    """A connection of version 2, and a topic with some partitions."""
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s")
    async with connect(broker.url, version=2) as peer:
        yield peer


def publishes(topic: str, partitions: list[int], numbers: list[int], **more: object) -> wire.Publishes:
    """One message for each of some partitions, by a producer in each."""
    names = [f"{topic}-producer-{partition}" for partition in partitions]
    return wire.Publishes(
        topic,
        partitions,
        [1] * len(partitions),
        names,
        numbers,
        numbers,
        **more,  # type: ignore[arg-type]
    )


async def answers(found: list["asyncio.Future[Frame]"]) -> list[str]:
    """What each part was answered: OK, or the code of an error."""
    told = []
    for answer in found:
        try:
            told.append(Type(checked(await asyncio.wait_for(answer, 60)).type).name)
        except Refused as error:
            told.append(error.code)
    return told


async def test_a_frame_publishes_to_several_partitions_and_another_settles(peer: Peer, topic: str) -> None:
    stream = Stream(peer, topic, "s", "c")
    await stream.open()
    request = publishes(topic, [0, 1, 2, 3], [1] * PARTITIONS)
    stored = peer.begin_several(request, PARTITIONS, messages("a", "b", "c", "d"))
    assert await answers(stored) == ["OK"] * PARTITIONS
    replies = [wire.properties_of(answer.result(), wire.PublishReply) for answer in stored]
    items = await stream.receive(PARTITIONS)
    ids = {item.partition: item.entry for item in items}
    assert ids == {number: reply.first for number, reply in enumerate(replies)}
    assert {item.partition: item.uid for item in items} == dict(enumerate("abcd"))
    size = len(items)
    acks = wire.Acks(
        [stream.number] * size, [item.partition for item in items], [1] * size, [None, [], None, []]
    )
    body = [value for item in items for value in wire.unpack(receipts("shared", item), list[str | int])]
    assert await answers(peer.begin_several(acks, size, wire.pack(body))) == ["OK"] * size
    again = peer.begin_several(acks, size, wire.pack(body))
    assert await answers(again) == ["OK"] * size
    stale = [wire.properties_of(answer.result(), wire.SettleReply).stale for answer in again]
    assert stale == [[0, item.entry, item.entry] for item in items]


async def test_answers_come_together_on_a_connection_of_version_2_alone(
    broker: RunningBroker, peer: Peer, topic: str
) -> None:
    request = publishes(topic, [0, 1, 2, 3], [1] * PARTITIONS)
    assert await answers(peer.begin_several(request, PARTITIONS, messages(*"abcd"))) == ["OK"] * PARTITIONS
    assert sum(len(said.stored) // 4 for said in peer.answers_together) == PARTITIONS
    async with connect(broker.url) as old:
        await old.ask(wire.Publish(topic, 0), wire.PublishReply, messages("e"))
        assert old.answers_together == []


async def test_a_part_that_is_refused_harms_no_other(peer: Peer, topic: str) -> None:
    request = publishes(topic, [0, 99, 1], [1, 1, 1])
    told = await answers(peer.begin_several(request, 3, messages("a", "b", "c")))
    assert told == ["OK", "invalid_argument", "OK"]
    request = publishes(topic, [0, 1], [2, 0])  # of which there is none
    assert await answers(peer.begin_several(request, 2, messages("d", "e"))) == ["OK", "invalid_argument"]


async def test_a_part_that_is_sent_again_is_a_duplicate(peer: Peer, topic: str) -> None:
    request = publishes(topic, [0, 1], [1, 1])
    first = peer.begin_several(request, 2, messages("a", "b"))
    assert await answers(first) == ["OK", "OK"]
    second = peer.begin_several(publishes(topic, [1, 2], [1, 1]), 2, messages("b", "c"))
    assert await answers(second) == ["OK", "OK"]
    found = [wire.properties_of(answer.result(), wire.PublishReply).duplicates for answer in second]
    one = wire.properties_of(first[1].result(), wire.PublishReply)
    assert found == [{0: f"{one.ledger}-{one.first}"}, {}]


async def test_parts_of_one_partition_are_stored_in_their_order(peer: Peer, topic: str) -> None:
    request = wire.Publishes(topic, [0, 0, 0], [1, 2, 1], [f"{topic}-p"] * 3, [1, 2, 4], [1, 1, 1])
    found = peer.begin_several(request, 3, messages("a", "b", "c", "d"))
    assert await answers(found) == ["OK"] * 3
    firsts = [wire.properties_of(answer.result(), wire.PublishReply).first for answer in found]
    assert firsts == [firsts[0], firsts[0] + 1, firsts[0] + 3]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [([1, 1], "invalid_argument"), ([2, 0], "invalid_argument"), ([3], "protocol_error")],
    ids=["too few", "an empty one", "another length"],
)
async def test_sizes_that_are_not_those_of_the_parts_are_refused_and_nothing_is_done(
    peer: Peer, topic: str, sizes: list[int], told: str
) -> None:
    names = [f"{topic}-p0", f"{topic}-p1"]
    parts = len(sizes)
    request = wire.Publishes(topic, [0, 1], sizes, names, [1, 1], [1, 1])
    assert await answers(peer.begin_several(request, parts, messages(*"abc"))) == [told] * parts
    acks = wire.Acks([1, 1], [0, 1], sizes, [None, None])
    body = wire.pack(["", 1, 1, 1] * 3)
    assert await answers(peer.begin_several(acks, parts, body)) == [told] * parts
    request = publishes(topic, [0, 1], [1, 1])
    whole = peer.begin_several(request, 2, messages("x", "y"))
    assert await answers(whole) == ["OK", "OK"]
    assert [wire.properties_of(answer.result(), wire.PublishReply).first for answer in whole] == [1, 1]


async def test_more_parts_than_a_frame_may_have_are_refused_in_one_answer(peer: Peer, topic: str) -> None:
    many = wire.MAX_BATCH + 1
    names = [f"{topic}-p"] * many
    ones = [1] * many
    [answer] = peer.begin_several(wire.Publishes(topic, ones, ones, names, ones, ones), 1, messages("a"))
    assert await answers([answer]) == ["protocol_error"]
    [answer] = peer.begin_several(wire.Acks(ones, ones, ones, [None] * many), 1, wire.pack(["", 1, 1, 1]))
    assert await answers([answer]) == ["protocol_error"]
    await peer.echo()


async def test_what_comes_behind_several_acks_does_not_overtake_them(peer: Peer, topic: str) -> None:
    stream = Stream(peer, topic, "s", "c")
    await stream.open()
    request = publishes(topic, [0, 1], [1, 1])
    assert await answers(peer.begin_several(request, 2, messages("a", "b"))) == ["OK", "OK"]
    items = await stream.receive(2)
    acks = wire.Acks([stream.number] * 2, [item.partition for item in items], [1, 1], [[], []])
    body = [value for item in items for value in wire.unpack(receipts("shared", item), list[str | int])]
    settled = peer.begin_several(acks, 2, wire.pack(body))
    left = peer.begin(wire.Unsubscribe(stream.number))
    assert await answers([*settled, left]) == ["OK"] * 3
    assert all(wire.properties_of(answer.result(), wire.SettleReply).stale == [] for answer in settled)
    later = Stream(peer, topic, "s", "d")
    await later.open()
    assert await later.waiting() == []


@pytest.mark.slow
async def test_a_frame_whose_parts_have_no_sequences_harms_nobody(
    broker: RunningBroker, peer: Peer, topic: str
) -> None:
    stream = Stream(peer, topic, "s", "c")
    await stream.open()
    requests = (
        (publishes(topic, [0, 0], [1, 1]), messages("a", "b")),
        (wire.Acks([1, 1], [0, 0], [1, 1], [None, None]), wire.pack(["", 1, 1, 1] * 2)),
    )
    async with connect(broker.url, version=2) as hostile:
        taken = Stream(hostile, topic, "s", "h")
        await taken.open()
        for request, body in requests:
            refused = hostile.begin_at(2**64 - 1, request, body)
            assert await answers([refused]) == ["protocol_error"]
        uids = [f"m{number}" for number in range(20)]
        await publish(peer, topic, 0, *uids)
    assert {item.uid for item in await stream.receive(20)} == set(uids)


@pytest.mark.parametrize("field", ["partitions", "sizes", "producers", "numbers", "named", "again"])
def test_parts_without_end_are_refused_before_they_are_in_memory(field: str) -> None:
    many = ["p" if field == "producers" else 0] * (wire.MAX_BATCH + 1)
    for count in (1, len(many)):
        request = msgspec.structs.replace(publishes("t", [0], [1]), **{field: many[:count]})
        frame = Frame(request.TYPE, 1, 0, memoryview(msgspec.msgpack.encode(request)), memoryview(b""))
        if count == 1:
            assert wire.properties_of(frame, wire.Publishes) == request
        else:
            with pytest.raises(ProtocolError, match="length"):
                wire.properties_of(frame, wire.Publishes)
