"""Turns in virtual time: what is stored, leased and settled in one call, and what if that fails."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keylane import wire
from keylane.errors import Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.dispatcher import Dispatcher
from tests.support.fake import TurningServer
from tests.support.peer import Item, Refused, Stream, messages, publish, receipts
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time

HOT = (
    "partition/publish",
    "subscription/fetch",
    "subscription/ack",
    "subscription/turn",
    "subscription/ack_whole",
)


class Watched:
    """A worker with a consumer that has been served; `calls` are those for messages since then."""

    def __init__(self, worker: SmallWorker, stream: Stream) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.calls: list[str] = []
        self.answer: Callable[[str], None] = lambda script: None  # may raise, though the call has been made
        self._run = worker.engine.store.run
        worker.engine.store.run = self._watch  # type: ignore[method-assign]

    async def _watch(self, script: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
        if script in HOT:
            self.calls.append(script)
        answer = await self._run(script, keys, *arguments)
        self.answer(script)
        return answer

    def lose_the_answer_to(self, script: str) -> None:
        """The next call of a script is carried out, and nobody hears of it."""

        def lose(called: str) -> None:
            if called == script:
                self.answer = lambda script: None
                raise Unavailable("the connection was lost")

        self.answer = lose

    def begin_ack(self, *items: Item) -> "asyncio.Future[wire.Frame]":
        """Settle, as a client does that knows the bodies."""
        request = wire.Ack(self.stream.number, items[0].partition, [])
        return self.peer.begin(request, receipts(self.stream.mode, *items))

    async def ack(self, *items: Item) -> wire.SettleReply:
        """Settle, and wait for the answer."""
        request = wire.Ack(self.stream.number, items[0].partition, [])
        return await self.peer.ask(request, wire.SettleReply, receipts(self.stream.mode, *items))


@asynccontextmanager
async def watched(mode: str = "shared") -> AsyncIterator[Watched]:
    """A worker that has nothing more to do than what a test asks of it."""
    async with SmallWorker(TurningServer(), topic=("t", 1)) as worker:
        stream = Stream(await worker.connect(), "t", "s", "c")
        await stream.open(mode=mode)
        await publish(stream.peer, "t", 0, "first", key="first")
        await stream.ack(*await stream.receive(1))
        await asyncio.sleep(1)
        yield Watched(worker, stream)


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
@in_virtual_time
async def test_a_message_takes_two_calls_from_publish_to_ack(mode: str) -> None:
    async with watched(mode) as here:
        for number in range(3):
            await publish(here.peer, "t", 0, f"m{number}", key=f"k{number}")
            [item] = await here.stream.receive(1)
            assert (await here.ack(item)).stale == []
        assert here.calls == ["subscription/turn", "subscription/ack_whole"] * 3


@in_virtual_time
async def test_messages_are_written_before_the_worker_learns_from_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def note(name: str, owner: type, method: str) -> None:
        call = getattr(owner, method)

        def noted(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(owner, method, noted)

    async with watched() as here:
        note("sent", Dispatcher, "deliver_turn")
        note("written", Connection, "flush")
        note("learnt", Engine, "learn_turn")
        note("confirmed", Connection, "published")
        await publish(here.peer, "t", 0, "a")
        assert events[:4] == ["sent", "written", "learnt", "confirmed"]
        assert [item.uid for item in await here.stream.receive(1)] == ["a"]


@in_virtual_time
async def test_a_publish_takes_acks_along() -> None:
    async with watched() as here:
        await publish(here.peer, "t", 0, "a")
        [item] = await here.stream.receive(1)
        here.calls.clear()
        acked, published = here.begin_ack(item), here.peer.begin(wire.Publish("t", 0), messages("b"))
        assert wire.properties_of(await published, wire.PublishReply).first == item.entry + 1
        assert wire.properties_of(await acked, wire.SettleReply).stale == []
        assert [other.uid for other in await here.stream.receive(1)] == ["b"]
        assert here.calls == ["subscription/turn"]


@in_virtual_time
async def test_acks_that_come_during_a_call_go_together_in_the_next() -> None:
    async with watched() as here:
        for uid in "abcd":
            await publish(here.peer, "t", 0, uid)
        items = await here.stream.receive(4)
        here.calls.clear()
        for answer in [here.begin_ack(item) for item in items]:
            assert wire.properties_of(await answer, wire.SettleReply).stale == []
        assert set(here.calls) == {"subscription/ack_whole"}
        assert len(here.calls) <= 2


@in_virtual_time
async def test_what_is_not_ordinary_is_done_by_the_other_scripts() -> None:
    async with watched() as here:
        await publish(here.peer, "t", 0, "a", "b")
        items = await here.stream.receive(2)
        assert (await here.ack(items[0])).stale == []  # a part of what was leased
        assert (await here.ack(items[0])).stale != []
        duplicate = await publish(here.peer, "t", 0, "a")
        assert duplicate.duplicates == {0: f"{duplicate.ledger}-{items[0].entry}"}
        assert (await here.ack(items[1])).stale == []
        await publish(here.peer, "t", 0, "c")
        assert [item.uid for item in await here.stream.receive(1)] == ["c"]


@in_virtual_time
async def test_messages_of_a_turn_whose_answer_is_lost_are_handed_over_and_refused() -> None:
    async with watched() as here:
        here.lose_the_answer_to("subscription/turn")
        with pytest.raises(Refused) as refused:
            await publish(here.peer, "t", 0, "a")
        assert refused.value.code == "unavailable"
        [item] = await here.stream.receive(1)
        assert item.uid == "a"
        again = await publish(here.peer, "t", 0, "a", again=True)
        assert list(again.duplicates) == [0]
        assert (await here.ack(item)).stale == []


@in_virtual_time
async def test_permits_come_back_where_the_answer_to_an_ack_is_lost() -> None:
    async with watched() as here:
        here.peer.send(wire.Flow(here.stream.number, limit=1))
        await publish(here.peer, "t", 0, "a")
        [item] = await here.stream.receive(1)
        here.lose_the_answer_to("subscription/ack_whole")
        with pytest.raises(Refused):
            await here.ack(item)
        await publish(here.peer, "t", 0, "b")
        assert [other.uid for other in await here.stream.receive(1)] == ["b"]


@in_virtual_time
async def test_who_leaves_does_not_overtake_its_acks() -> None:
    async with watched() as here:
        for uid in "ab":
            await publish(here.peer, "t", 0, uid)
        items = await here.stream.receive(2)
        acks = [here.begin_ack(item) for item in items]
        left = here.peer.begin(wire.Unsubscribe(here.stream.number))
        for answer in acks:
            assert wire.properties_of(await answer, wire.SettleReply).stale == []
        await left
