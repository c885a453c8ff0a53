"""Levels of durability through client and worker: one order whatever the levels, and true answers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from keylane import AsyncClient, OutgoingMessage, wire
from keylane.wire import Type
from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import ReplicaPair, replica_pair
from tests.support.peer import connect
from tests.support.running import RunningBroker

SOON = 60.0  # seconds
LEVELS = ("memory", "replicated", "fsync")


@pytest.fixture(scope="module")
def pair() -> Iterator[ReplicaPair]:
    """A server that writes to disk, with a replica."""
    with replica_pair(appendonly=True) as servers:
        yield servers


@pytest.fixture(scope="module")
def replicated(pair: ReplicaPair) -> Iterator[RunningBroker]:
    """A broker on it."""
    with RunningBroker(pair.master) as broker:
        yield broker


@contextmanager
def hanging(pair: ReplicaPair) -> Iterator[None]:
    """The replica hangs: it counts as connected, and confirms nothing."""
    pid = int(ask(pair.replica.port, "INFO", "server").partition("process_id:")[2].split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def messages(*uids: str) -> bytes:
    """The body of a PUBLISH."""
    return wire.pack([text for uid in uids for text in ("k", uid, "1   ")])


@pytest.mark.slow
async def test_one_call_with_several_levels_keeps_its_order(replicated: RunningBroker, topic: str) -> None:
    async with AsyncClient(replicated.url) as client:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s", mode="key_shared") as consumer:
            numbers = range(150)
            answers = await client.publish_many(
                topic, [OutgoingMessage(str(n), key="k", durability=LEVELS[n % 3]) for n in numbers]
            )
            assert [answer.entry for answer in answers] == list(
                range(answers[0].entry, answers[0].entry + 150)
            )
            assert [answer.durability for answer in answers] == [LEVELS[n % 3] for n in numbers]
            got = []
            for _ in numbers:
                async with await consumer.receive(SOON) as message:
                    got.append(int(await message.data()))
            assert got == list(numbers)


@pytest.mark.slow
async def test_answers_keep_the_order_of_the_frames_and_say_what_was_stored(
    replicated: RunningBroker, pair: ReplicaPair, topic: str
) -> None:
    async with connect(replicated.url) as peer, connect(replicated.url) as other:
        await peer.answer(wire.CreateTopic(topic, 1))
        await peer.answer(wire.CreateSubscription(topic, "s"))
        answered: list[int] = []

        def note(number: int, _: object) -> None:
            answered.append(number)

        with hanging(pair):
            answers = []
            for number, level in enumerate(("replicated", "memory", "replicated", "memory")):
                answer = peer.begin(wire.Publish(topic, 0, level, timeout_ms=2_000), messages(f"u{number}"))
                answer.add_done_callback(partial(note, number))
                answers.append(answer)
            # Another connection does not wait for these.
            fast = await other.ask(wire.Publish(topic, 0), wire.PublishReply, messages("fast"))
            assert fast.first == 5
            assert answered == []
            frames = [await asyncio.wait_for(answer, SOON) for answer in answers]
        assert answered == [0, 1, 2, 3]
        assert [frame.type for frame in frames] == [Type.ERROR, Type.OK, Type.ERROR, Type.OK]
        for frame in frames[::2]:
            error = wire.properties_of(frame, wire.Error)
            assert (error.code, error.stored) == ("durability_not_reached", True)
        entries = [wire.properties_of(frame, wire.PublishReply).first for frame in frames[1::2]]
        assert entries == [2, 4], "all four are in the log, in the order of the frames"
        again = await peer.ask(wire.Publish(topic, 0), wire.PublishReply, messages("u0", "u2"))
        assert [id.partition("-")[2] for id in again.duplicates.values()] == ["1", "3"]


async def test_a_level_out_of_reach_stores_nothing_and_what_is_behind_waits_for_again(
    broker: RunningBroker, topic: str
) -> None:
    async with connect(broker.url) as peer:
        await peer.answer(wire.CreateTopic(topic, 1))
        await peer.answer(wire.CreateSubscription(topic, "s"))
        answers = [
            peer.begin(wire.Publish(topic, 0, level), messages(f"u{number}"))
            for number, level in enumerate(("memory", "replicated", "memory", "fsync"))
        ]
        frames = [await asyncio.wait_for(answer, SOON) for answer in answers]
        assert [frame.type for frame in frames] == [Type.OK, Type.ERROR, Type.ERROR, Type.ERROR]
        assert not any(wire.properties_of(frame, wire.Error).stored for frame in frames[1:])
        later = await peer.ask(wire.Publish(topic, 0, again=True), wire.PublishReply, messages("u2", "u3"))
        assert (later.first, later.duplicates) == (2, {}), "none of them was stored"


@pytest.mark.slow
async def test_the_command_line_says_whether_they_were_stored(
    replicated: RunningBroker, pair: ReplicaPair, broker: RunningBroker, topic: str
) -> None:
    async def publish(url: str) -> tuple[str, int]:
        async with AsyncClient(url) as client:
            await client.create_topic(topic, partitions=1)
            await client.create_subscription(topic, "s")
            words = ["publish", topic, "x", "--durability", "replicated", "--count", "1500"]
            done = await asyncio.to_thread(
                subprocess.run,
                [str(Path(sys.executable).parent / "keylane"), *words],
                capture_output=True,
                text=True,
                timeout=200,
                env={**os.environ, "KEYLANE_SERVER": url},
            )
            assert done.returncode == 1
            return done.stderr, (await client.describe_topic(topic)).messages

    with hanging(pair):
        said, stored = await publish(replicated.url)
    assert (
        "the messages are stored in memory (of 1500, the 0 before these 1000 were published, and the 500"
        in said
    )
    assert stored == 1_000
    said, stored = await publish(broker.url)
    assert "nothing was stored" in said
    assert stored == 0
