"""Settling: what goes in one frame, who waits for which answer, what is tried again; in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from keylane import wire
from keylane.connect.connection import Redirected
from keylane.consume.block import HANDED, SETTLED, STALE, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import ACK, GIVE_BACK, NACK, nack_kind
from keylane.consume.settler import Settler
from keylane.consume.streams import Streams
from keylane.errors import BrokerError, ConnectionClosed, InvalidArgument, StaleReceipt, Unavailable
from keylane.wire import Frame, Properties, Type
from tests.support.blocks import block
from tests.support.virtual_time import virtual as virtual

Run = Callable[[Coroutine[Any, Any, None]], None]


class Worker:
    """Stands for the streams of a consumer and for the worker behind them: answers after 10 ms."""

    number = 1
    timeout = 30.0
    current = object()

    def __init__(self) -> None:
        self.frames: list[tuple[Properties, list[Any]]] = []
        self.times: list[float] = []
        self.errors: list[BrokerError] = []  # to be said first
        self.stale: list[int] = []
        self.doubted: list[int] = []

    async def reach(self, partition: int, within: float) -> "Worker":
        return self

    def serving(self, partition: int) -> "Worker":
        return self

    def doubt(self, partition: int, error: BrokerError) -> None:
        self.doubted.append(partition)

    def ask(self, partition: int, question: Properties, receipts: list[Any]) -> asyncio.Future[Frame]:
        self.frames.append((question, receipts))
        self.times.append(asyncio.get_running_loop().time())
        return asyncio.ensure_future(self._answer())

    async def _answer(self) -> Frame:
        await asyncio.sleep(0.01)
        if self.errors:
            raise self.errors.pop(0)
        reply = wire.SettleReply(stale=self.stale, deadline_ms=60_000)
        return Frame(Type.OK, 1, 0, memoryview(wire.pack(reply)), memoryview(b""))

    @property
    def receipts(self) -> list[list[Any]]:
        return [body for _, body in self.frames]


class Story:
    """A settler, the leases it settles, and its worker."""

    def __init__(self, mode: str = "shared") -> None:
        self.loop = asyncio.get_running_loop()
        self.worker = Worker()
        self.told: list[tuple[Block, int]] = []
        self.deleted: list[str] = []
        self.leases = Leases(lambda partition, count: None, self._give_back)
        self.leases.mode = mode
        self.settler = Settler(
            self.leases,
            cast(Streams, self.worker),
            on_extended=lambda deadline: None,
            on_stale=lambda held, index: self.told.append((held, index)),
            delete_bodies=self.deleted.extend,
        )

    def _give_back(self, spans: list[Span]) -> object:
        return self.settler.submit(GIVE_BACK, spans)

    def take(self, messages: list[tuple[int, str]] | int, **more: Any) -> Block:
        """Put messages into the application's hands."""
        held = block(messages, now=self.loop.time(), **more)
        if held.gone is None:
            self.leases.add(held)
        for index in range(len(held)):
            held.states[index] = HANDED
        return held


# In the background


def test_what_nobody_waits_for_goes_together_after_a_moment(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(4)
        began = told.loop.time()
        for index in (0, 1, 3):
            assert not told.settler.settle_later(held, index, ACK)
        await asyncio.sleep(0.1)
        assert told.worker.receipts == [["", 1, 1, 2, "", 1, 4, 4]]
        assert told.worker.times[0] - began == pytest.approx(0.002)
        assert list(held.states) == [SETTLED, SETTLED, HANDED, SETTLED]

    virtual(story())


def test_much_goes_at_once_and_says_so(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(500)
        began = told.loop.time()
        assert [told.settler.settle_later(held, index, ACK) for index in range(500)].count(True) == 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert told.worker.receipts == [["", 1, 1, 500]]
        assert told.loop.time() == began

    virtual(story())


def test_what_comes_too_late_in_the_background_is_told(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(2)
        told.worker.stale = [0, 2, 2]
        told.settler.settle_later(held, 0, ACK)
        told.settler.settle_later(held, 1, ACK)
        await asyncio.sleep(0.1)
        assert told.told == [(held, 1)]
        late = told.take([(9, "")], token=2)
        await asyncio.sleep(60.0)
        told.settler.settle_later(late, 0, ACK)
        assert told.told == [(held, 1), (late, 0)], "without asking"
        assert len(told.worker.frames) == 1

    virtual(story())


# With an answer


def test_who_settles_the_same_twice_waits_for_one_answer(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(1)
        await asyncio.gather(told.settler.one(ACK, held, 0), told.settler.one(ACK, held, 0))
        assert len(told.worker.frames) == 1
        with pytest.raises(StaleReceipt, match="already settled"):
            await told.settler.one(ACK, held, 0)

    virtual(story())


def test_who_was_cancelled_hears_the_answer_when_it_asks_again(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await told.settler.one(ACK, held, 0)
        await asyncio.sleep(0.1)
        await told.settler.one(ACK, held, 0)
        assert len(told.worker.frames) == 1

    virtual(story())


def test_of_many_each_has_an_outcome_in_the_order_given(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(4)
        spans = [(held, index, index + 1) for index in (2, 0, 2, 1)]
        told.worker.stale = [0, 1, 1]
        assert await told.settler.many(ACK, spans) == ["settled", "stale", "stale", "settled"]
        assert await told.settler.many(ACK, [(held, 0, 4)]) == ["stale", "stale", "stale", "settled"]

    virtual(story())


def test_an_answer_that_was_lost_is_asked_for_again_until_the_time_is_up(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(1, lease=600.0)
        told.worker.errors = [ConnectionClosed("lost"), Redirected("orders", 0, ""), Unavailable("not now")]
        await told.settler.one(ACK, held, 0)
        assert len(told.worker.frames) == 4
        assert told.worker.doubted == [0, 0], "perhaps another worker has the partition"
        other = told.take([(2, "")], token=2, lease=600.0)
        told.worker.errors = [Unavailable("not now")] * 100
        began = told.loop.time()
        with pytest.raises(Unavailable):
            await told.settler.one(ACK, other, 0)
        assert 25.0 < told.loop.time() - began < 30.1, "the last attempt takes its time"
        assert list(other.states) == [HANDED], "to be tried again"

    virtual(story())


def test_what_is_refused_for_good_is_in_hands_again_or_let_go_if_nobody_waits(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(2)
        told.worker.errors = [InvalidArgument("no")]
        with pytest.raises(InvalidArgument):
            await told.settler.one(ACK, held, 0)
        told.worker.errors = [InvalidArgument("no")]
        told.settler.settle_later(held, 1, ACK)
        await asyncio.sleep(0.1)
        assert list(held.states) == [HANDED, STALE]
        assert told.told == [(held, 1)]

    virtual(story())


def test_a_nack_that_is_stale_after_its_answer_was_lost_was_done(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(2)
        told.worker.errors = [ConnectionClosed("lost")]
        told.worker.stale = [0, 1, 1]
        await told.settler.one(NACK, held, 0)
        told.worker.errors = [ConnectionClosed("lost")]
        told.worker.stale = [0, 2, 2]
        with pytest.raises(StaleReceipt):
            await told.settler.one(ACK, held, 1)

    virtual(story())


def test_kinds_that_differ_go_in_frames_of_their_own(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(3)
        one, two = nack_kind(1.0, None), nack_kind(2.0, None)
        await asyncio.gather(
            told.settler.one(one, held, 0), told.settler.one(two, held, 1), told.settler.one(one, held, 2)
        )
        assert [question for question, _ in told.worker.frames] == [
            wire.Nack(1, 0, 1_000),
            wire.Nack(1, 0, 2_000),
        ]

    virtual(story())


# At most once, and the end


def test_at_most_once_nothing_is_sent_and_bodies_are_deleted_that_left_the_log(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(3, about="1 1  5 ", settled=[1, 2])
        assert await told.settler.many(ACK, [(held, 0, 3)]) == ["settled"] * 3
        assert told.worker.frames == []
        assert told.deleted == ["uid-1", "uid-2"]

    virtual(story())


def test_at_its_end_it_sends_what_is_queued_and_takes_no_more(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(2)
        told.settler.settle_later(held, 0, ACK)
        await told.settler.finish()
        assert list(held.states) == [SETTLED, HANDED]
        with pytest.raises(ConnectionClosed, match="unsettled messages were given back"):
            await told.settler.one(ACK, held, 1)
        await told.settler.close()

    virtual(story())


def test_who_waits_when_it_is_given_up_hears_so(virtual: Run) -> None:
    async def story() -> None:
        told = Story()
        held = told.take(1)
        acking = asyncio.ensure_future(told.settler.one(ACK, held, 0))
        await asyncio.sleep(0.005)
        await told.settler.close()
        with pytest.raises(ConnectionClosed, match="before the broker answered"):
            await acking

    virtual(story())
