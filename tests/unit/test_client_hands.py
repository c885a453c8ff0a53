"""What the application has in its hands, and what waits for it: pauses, caps, cancels, acks tried again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from keylane import Message, wire
from keylane.consume.block import BUFFERED, HANDED
from keylane.errors import StaleReceipt, Unavailable
from tests.support.scripted_client import Open, Shelf, client_is_quiet, entries, take, wire_time
from tests.support.scripted_worker import ScriptedWorker


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        yield worker


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


class Work:
    """A handler whose every run ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._gates: dict[int, asyncio.Event] = {}
        self._news = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        (entry,) = entries([message])
        self.begun.append(entry)
        self._news.set()
        await self._gates.setdefault(entry, asyncio.Event()).wait()

    def end(self, *numbers: int) -> None:
        for entry in numbers:
            self._gates.setdefault(entry, asyncio.Event()).set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < count:
                self._news.clear()
                await self._news.wait()


# Pause


async def test_a_pause_gives_back_what_waits_behind_a_handler_in_its_lane(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    work = Work()
    async with Open(worker, shelf, mode="key_shared", handler=work) as consumer:
        worker.link.data([(1, "a"), (2, "a"), (3, "a"), (4, "b")])
        await work.reach(2)
        pausing = asyncio.ensure_future(consumer.pause())
        request = await worker.expect(wire.Nack)
        assert (request.body, request.properties.charged) == (["=a", 1, 2, 3], False)
        request.ok()
        await pausing
        work.end(1, 4)
        acks = await worker.expect(wire.Ack)
        assert acks.body == ["=a", 1, 1, 1, "=b", 1, 4, 4]
        acks.ok()
        await client_is_quiet(worker)
        assert work.begun == [1, 4]
        await consumer.resume()
        worker.link.data([(2, "a"), (3, "a")], token=2)
        work.end(2, 3)
        await work.reach(4)
        assert work.begun == [1, 4, 2, 3]
        (await worker.expect(wire.Ack)).ok()


async def test_a_pause_gives_back_what_waits_for_a_free_handler(worker: ScriptedWorker, shelf: Shelf) -> None:
    work = Work()
    async with Open(worker, shelf, handler=work, concurrency=1) as consumer:
        worker.link.data(3)
        await work.reach(1)
        pausing = asyncio.ensure_future(consumer.pause())
        request = await worker.expect(wire.Nack)
        assert (request.body, request.properties.charged) == (["", 1, 2, 3], False)
        request.ok()
        await pausing
        work.end(1, 2, 3)
        (await worker.expect(wire.Ack)).ok()
        await client_is_quiet(worker)
        assert work.begun == [1]
        await consumer.resume()
        worker.link.data([(2, ""), (3, "")], token=2)
        await work.reach(3)
        assert work.begun == [1, 2, 3]
        (await worker.expect(wire.Ack)).ok()


async def test_what_cannot_go_back_waits_behind_handlers_until_the_pause_ends(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    work = Work()
    async with Open(worker, shelf, mode="exclusive", delivery="at_most_once", handler=work) as consumer:
        worker.link.data(3, settled=[], lease=0)
        await work.reach(1)
        await consumer.pause()
        work.end(1, 2, 3)
        await client_is_quiet(worker)
        assert work.begun == [1]
        await consumer.resume()
        await work.reach(3)
        assert work.begun == [1, 2, 3]


async def test_a_paused_consumer_with_handlers_closes(worker: ScriptedWorker, shelf: Shelf) -> None:
    work = Work()
    async with Open(worker, shelf, mode="exclusive", delivery="at_most_once", handler=work) as consumer:
        worker.link.data(3, settled=[], lease=0)
        await work.reach(1)
        await consumer.pause()
        work.end(1)
        await client_is_quiet(worker)
    assert work.begun == [1]


# The cap of extensions


@pytest.mark.slow
async def test_what_was_never_in_hands_goes_back_uncharged_before_its_lease_ends(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """Of a handler that hangs for longer than leases are kept."""
    work = Work()
    async with Open(worker, shelf, lease=2.0, auto_extend=2.5, handler=work, concurrency=1):
        worker.link.data(3, lease=2.0)
        await work.reach(1)
        request = await _given_back(worker, 2.0)
        assert (request.body, request.properties.charged) == (["", 1, 2, 3], False)
        request.ok()
        work.end(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "receipts"),
    [("shared", ["", 1, 2, 3]), ("exclusive", ["=", 1, 2, 2])],
    ids=["shared", "exclusive"],
)
async def test_what_waits_is_given_back_though_leases_are_not_extended(
    worker: ScriptedWorker, shelf: Shelf, mode: str, receipts: list[str | int]
) -> None:
    async with Open(worker, shelf, mode=mode, lease=2.5, auto_extend=False) as consumer:
        worker.link.data(3, lease=2.5)
        (first,) = await take(consumer, 1)
        acking = asyncio.ensure_future(first.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking
        request = await worker.expect(wire.Nack)
        assert (request.body, request.properties.charged) == (receipts, False)
        request.ok()


@pytest.mark.slow
async def test_the_cap_counts_from_when_a_message_is_in_hands(worker: ScriptedWorker, shelf: Shelf) -> None:
    """Each handler takes until its lease was extended once; all of a lane together longer than the cap."""
    work = Work()
    async with Open(worker, shelf, mode="exclusive", lease=1.0, auto_extend=1.5, handler=work):
        worker.link.data(5, lease=1.0)
        for entry in range(1, 6):
            await work.reach(entry)
            request = await worker.expect(wire.Extend)
            assert request.body == ["=", 1, entry, entry]
            request.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 1_000))
            work.end(entry)
            (await worker.expect(wire.Ack)).ok()
        assert work.begun == [1, 2, 3, 4, 5]


async def _given_back(worker: ScriptedWorker, lease: float) -> Any:
    """The next NACK, while extensions are granted."""
    nack = asyncio.create_task(worker.expect(wire.Nack))
    while not nack.done():
        extend = asyncio.create_task(worker.expect(wire.Extend))
        await asyncio.wait({nack, extend}, return_when=asyncio.FIRST_COMPLETED)
        if extend.done():
            extend.result().ok(wire.SettleReply(deadline_ms=wire_time(worker) + round(lease * 1000)))
        else:
            extend.cancel()
    return nack.result()


# Cancellation


async def test_to_be_cancelled_inside_a_block_gives_the_message_back_uncharged(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        inside = asyncio.Event()

        async def handle() -> None:
            async with message:
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handle())
        await inside.wait()
        task.cancel()
        request = await worker.expect(wire.Nack)
        assert (request.body, request.properties.charged) == (["", 1, 1, 1], False)
        request.ok()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_what_ends_the_program_says_nothing_of_the_message(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        with pytest.raises(KeyboardInterrupt):
            async with message:
                raise KeyboardInterrupt
        request = await worker.expect(wire.Nack)
        assert request.properties.charged is False
        request.ok()


# Acks that are tried again


async def _cancelled(work: Any) -> None:
    """Begin it, and give it up while the worker has not answered."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_an_ack_that_is_tried_again_joins_the_one_that_is_under_way(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(2)
        first, second = await take(consumer, 2)
        await _cancelled(consumer.ack([first, second]))
        request = await worker.expect(wire.Ack)
        again = asyncio.gather(
            first.ack(), consumer.ack([first, second]), second.ack(), return_exceptions=True
        )
        await client_is_quiet(worker)
        request.ok(wire.SettleReply(stale=[0, 2, 2]))
        settled, both, stale = await again
        assert settled is None
        assert both == ["settled", "stale"]
        assert isinstance(stale, StaleReceipt)
        assert worker.seen(wire.Ack) == 0


async def test_an_ack_that_was_answered_when_nobody_waited_tells_who_tries_again(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(4)
        messages = await take(consumer, 4)
        await _cancelled(messages[0].ack())
        (await worker.expect(wire.Ack)).ok()
        await _cancelled(consumer.ack(messages[1:]))
        (await worker.expect(wire.Ack)).ok(wire.SettleReply(stale=[0, 4, 4]))
        await client_is_quiet(worker)
        await messages[0].ack()
        assert await consumer.ack(messages[1:]) == ["settled", "settled", "stale"]
        assert await consumer.ack(messages[1:]) == ["stale"] * 3, "this was told by now"
        with pytest.raises(StaleReceipt, match="already settled"):
            await messages[0].ack()


async def test_who_wants_another_thing_than_what_is_under_way_is_told(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        await _cancelled(message.ack())
        request = await worker.expect(wire.Ack)
        with pytest.raises(StaleReceipt, match="already being acked"):
            await message.nack()
        assert await consumer.nack([message]) == ["stale"]
        with pytest.raises(StaleReceipt, match="already being acked"):
            await message.extend(5)
        request.ok()
        await client_is_quiet(worker)
        with pytest.raises(StaleReceipt, match="already settled"):
            await message.nack()


async def test_an_ack_joins_one_in_the_background(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        async with message:
            pass
        acking = asyncio.ensure_future(message.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking


async def test_an_ack_that_failed_fails_all_who_wait_and_can_be_tried_again(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        both = asyncio.gather(message.ack(), message.ack(), return_exceptions=True)
        (await worker.expect(wire.Ack)).error("invalid_argument", "no such luck")
        errors = await both
        assert [str(error) for error in errors] == ["no such luck"] * 2
        assert errors[0] is not errors[1]
        acking = asyncio.ensure_future(message.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking


async def test_an_ack_whose_first_attempt_was_perhaps_done_is_not_confirmed(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """Or the broker is ending the session, in steps, and has not told yet: the message comes again then."""
    async with Open(worker, shelf) as consumer:
        worker.link.data(3)
        first, second, third = await take(consumer, 3)
        acking = asyncio.ensure_future(consumer.ack([first, second]))
        (await worker.expect(wire.Ack)).error("unavailable", "Redis is away")
        (await worker.expect(wire.Ack)).ok(wire.SettleReply(stale=[0, 1, 1]))
        assert await acking == ["stale", "settled"]
        acking_one = asyncio.ensure_future(third.ack())
        (await worker.expect(wire.Ack)).error("unavailable", "Redis is away")
        (await worker.expect(wire.Ack)).ok(wire.SettleReply(stale=[0, 3, 3]))
        with pytest.raises(StaleReceipt, match="or it was settled before"):
            await acking_one


async def test_a_nack_whose_first_attempt_was_done_unheard_is_settled(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """The lease goes on and nobody has ended it: it has gone back, one way or the other."""
    async with Open(worker, shelf) as consumer:
        worker.link.data(3)
        first, second, third = await take(consumer, 3)
        nacking = asyncio.ensure_future(consumer.nack([first, second]))
        (await worker.expect(wire.Nack)).error("unavailable", "Redis is away")
        again = await worker.expect(wire.Nack)
        worker.link.send(wire.Ended(1, 0, 1), body=wire.pack([1, 2, 2]))
        again.ok(wire.SettleReply(stale=[0, 1, 2]))
        assert await nacking == ["settled", "stale"], "of the second the worker has said that its lease ended"
        nacking = asyncio.ensure_future(consumer.nack([third]))
        (await worker.expect(wire.Nack)).ok(wire.SettleReply(stale=[0, 3, 3]))
        assert await nacking == ["stale"], "it was asked once"


@pytest.mark.slow
async def test_an_ack_that_gave_up_and_is_tried_again_may_have_been_done(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, timeout=2.0) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        acking = asyncio.ensure_future(message.ack())
        while not acking.done():
            asking = asyncio.create_task(worker.expect(wire.Ack))
            await asyncio.wait({acking, asking}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result().error("unavailable", "Redis is away")
            else:
                asking.cancel()
        assert isinstance(acking.exception(), Unavailable)
        acking = asyncio.ensure_future(message.ack())
        (await worker.expect(wire.Ack)).ok(wire.SettleReply(stale=[0, 1, 1]))
        with pytest.raises(StaleReceipt, match="or it was settled before"):
            await acking


# Handing over


async def test_what_is_in_hands_has_its_time_before_anybody_sees_that_it_is(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """Another thread hands out, and may be interrupted anywhere; the loop looks at any moment."""
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await consumer.pull(1)
        block, seen = message._block, []

        class Watched(dict[int, float]):
            def __setitem__(self, index: int, at: float) -> None:
                seen.append(block.states[index])
                super().__setitem__(index, at)

        block.taken = Watched()
        assert consumer.leases.hand(block, 0)
        assert seen == [BUFFERED]


async def test_leases_are_extended_though_of_one_nobody_knows_when_it_was_taken(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, lease=3600.0) as consumer:
        worker.link.data(2, lease=3600.0)
        lost, _ = await consumer.pull(2)
        block = lost._block
        block.states[0] = HANDED
        block.deadline = block.soonest = block.deadline - 2400  # due
        consumer.extender.wake_at(block.soonest)
        request = await worker.expect(wire.Extend)
        assert request.body == ["", 1, 2, 2]
        request.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 3_600_000))


# What it costs


class _Watched(dict[Any, Any]):
    """Counts how often somebody looks at all that is held."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
async def test_what_comes_and_what_is_acked_costs_nothing_for_what_else_is_held(
    worker: ScriptedWorker, shelf: Shelf, mode: str
) -> None:
    async with Open(worker, shelf, mode=mode, permits=10_000) as consumer:
        for entry in range(1, 2_000):  # more lanes than are remembered without a need
            worker.link.data([(entry, f"k{entry}")], token=entry)
        messages = await take(consumer, 1_999)
        held = consumer.leases
        held.blocks = watched = _Watched(held.blocks)
        for message in messages[:1_500]:
            acking = asyncio.ensure_future(message.ack())
            (await worker.expect(wire.Ack)).ok()
            await acking
        for entry in range(1_999, 2_009):
            worker.link.data([(entry, f"k{entry}")], token=5_000 + entry)
        assert entries(await take(consumer, 10)) == list(range(1_999, 2_009))
        assert watched.walks <= 2, "now and then, to forget lanes"
        if mode != "shared":
            places = held._in_order[0]
            assert len(places) == sum(block.open for block in held.blocks), "nothing stays of what is settled"
            with pytest.raises(StaleReceipt):
                await messages[-1].ack()
