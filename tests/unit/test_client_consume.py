"""Consuming from a worker whose every frame the test decides."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import AsyncClient, Message, wire
from keylane.bridge import Bridge
from keylane.consume.block import STALE
from keylane.errors import (
    ConnectionClosed,
    ConsumerReplaced,
    InvalidArgument,
    PayloadMissing,
    StaleReceipt,
    SubscriptionBusy,
    SubscriptionNotFound,
    Unavailable,
)
from keylane.sync.consumer import SyncConsumer
from tests.support.scripted_client import Open, Shelf, client_is_quiet, entries, take, wire_time
from tests.support.scripted_worker import PATIENCE, ScriptedWorker
from tests.support.waiting import until


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        yield worker


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


# Handing out


async def test_a_message_has_what_the_producer_said(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        published = datetime.now(UTC).replace(microsecond=0)
        ms = round(published.timestamp() * 1000)
        about = f'{ms} {ms - 5000} team  {{"colour":"blue"}}'
        worker.link.data([(41, "customer-7")], token=99, about=about)
        message = await consumer.receive()
        assert (message.topic, message.partition, message.id) == ("orders", 0, "0:7-41")
        assert (message.key, message.uid, message.token) == ("customer-7", "uid-41", 99)
        assert message.attributes == {"colour": "blue"}
        assert message.producer_group == "team"
        assert message.published_at == published
        assert message.produced_at == published - timedelta(seconds=5)
        assert 0 <= message.age < 60
        assert timedelta(0) < message.deadline - datetime.now(UTC) <= timedelta(seconds=30)
        assert await message.data() == b""
        assert message.retry_count == 0


async def test_receive_gives_up_when_nothing_comes(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        with pytest.raises(TimeoutError, match="'billing' of 'orders'"):
            await consumer.receive(timeout=0.01)


async def test_who_has_a_handler_takes_no_messages_by_hand(worker: ScriptedWorker, shelf: Shelf) -> None:
    """They would wait for ever for what the handler gets, or take it away from it."""

    async def handle(message: Message) -> None:
        pass

    async with Open(worker, shelf, handler=handle) as consumer:
        with pytest.raises(InvalidArgument, match="has a handler, which gets every message: wait"):
            await consumer.receive(timeout=PATIENCE)
        with pytest.raises(InvalidArgument, match="subscribe without handler="):
            async for _ in consumer:
                pass
        with pytest.raises(InvalidArgument, match="has a handler"):
            consumer.batches()
        blocking = SyncConsumer(consumer, Bridge(asyncio.get_running_loop(), "closed"))
        with pytest.raises(InvalidArgument, match="has a handler"):
            next(iter(blocking))
        with pytest.raises(InvalidArgument, match="has a handler"):
            blocking.receive()
        with pytest.raises(InvalidArgument, match="has a handler"):
            next(blocking.batches())


@pytest.mark.parametrize("messages", [3, ["x"], [None]])
async def test_only_messages_can_be_settled_and_one_is_no_list(
    worker: ScriptedWorker, shelf: Shelf, messages: Any
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        one: Any = (await take(consumer, 1))[0]
        blocking = SyncConsumer(consumer, Bridge(asyncio.get_running_loop(), "closed"))
        for wrong in (messages, one):
            with pytest.raises(InvalidArgument, match=r"is no message|use a list of messages"):
                await consumer.ack(wrong)
            with pytest.raises(InvalidArgument, match=r"is no message|use a list of messages"):
                blocking.nack(wrong)


@pytest.mark.parametrize("wrong", [-1, "5"])
async def test_a_wrong_timeout_leaves_no_warning(worker: ScriptedWorker, shelf: Shelf, wrong: Any) -> None:
    async with Open(worker, shelf) as consumer:
        with pytest.raises(InvalidArgument, match="timeout is"):
            await consumer.receive(timeout=wrong)


async def test_batches_are_cut_from_what_is_there(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(5)
        worker.link.data([(6, ""), (7, "")], token=2)
        await client_is_quiet(worker)
        batches = consumer.batches(max_messages=4)
        first, second = await anext(batches), await anext(batches)
        assert (entries(list(first)), entries(list(second))) == ([1, 2, 3, 4], [5, 6, 7])
        assert first[-1].id == "0:7-4"
        assert entries(first[1:3]) == [2, 3]
        assert second[2].token == 2


async def test_a_batch_waits_for_more_from_its_first_message_on(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        waiting = asyncio.ensure_future(anext(consumer.batches(max_messages=3, max_wait=PATIENCE)))
        worker.link.data([(1, "")])
        await client_is_quiet(worker)
        assert not waiting.done()
        worker.link.data([(2, ""), (3, "")])
        assert entries(list(await waiting)) == [1, 2, 3]


# Settling


async def test_a_batch_is_acked_with_one_receipt(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1_000, token=5)
        batch = await anext(consumer.batches())
        acking = asyncio.ensure_future(consumer.ack(batch))
        request = await worker.expect(wire.Ack)
        assert request.body == ["", 5, 1, 1_000]
        request.ok(wire.SettleReply(stale=[0, 3, 4]))
        outcomes = await acking
        assert outcomes == ["settled"] * 2 + ["stale"] * 2 + ["settled"] * 996


@pytest.mark.parametrize(("mode", "lane"), [("shared", ""), ("exclusive", "=")])
async def test_entries_that_are_not_in_a_row_have_receipts_of_their_own_in_whatever_order_they_come(
    worker: ScriptedWorker, shelf: Shelf, mode: str, lane: str
) -> None:
    """As many as from the first to the last, and yet not these."""
    async with Open(worker, shelf, mode=mode) as consumer:
        worker.link.data([(entry, "") for entry in (1, 2, 7, 8, 5, 6)])
        acking = asyncio.ensure_future(consumer.ack(await anext(consumer.batches())))
        request = await worker.expect(wire.Ack)
        assert request.body == [lane, 1, 1, 2, lane, 1, 7, 8, lane, 1, 5, 6]
        request.ok()
        assert await acking == ["settled"] * 6


async def test_lanes_have_receipts_of_their_own(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf, mode="key_shared") as consumer:
        worker.link.data([(1, "a"), (2, "a"), (3, "b"), (4, ""), (5, ""), (7, "")], token=5)
        acking = asyncio.ensure_future(consumer.ack(await take(consumer, 6)))
        request = await worker.expect(wire.Ack)
        assert request.body == ["=a", 5, 1, 2, "=b", 5, 3, 3, "", 5, 4, 5, "", 5, 7, 7]
        request.ok(wire.SettleReply())
        assert await acking == ["settled"] * 6


async def test_a_partition_kept_in_order_is_one_lane(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf, mode="exclusive") as consumer:
        worker.link.data([(1, "a"), (2, "b")], token=5)
        acking = asyncio.ensure_future(consumer.ack(await take(consumer, 2)))
        request = await worker.expect(wire.Ack)
        assert request.body == ["=", 5, 1, 2]
        request.ok()
        await acking


async def test_ack_waits_for_the_answer_and_says_when_it_came_too_late(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(2)
        first, second = await take(consumer, 2)
        acking = asyncio.gather(first.ack(), second.ack(), return_exceptions=True)
        request = await worker.expect(wire.Ack)
        assert request.body == ["", 1, 1, 2]
        assert not acking.done()
        request.ok(wire.SettleReply(stale=[0, 2, 2]))
        settled, stale = await acking
        assert settled is None
        assert isinstance(stale, StaleReceipt)
        with pytest.raises(StaleReceipt, match="already settled"):
            await first.ack()
        assert await consumer.ack([first, second]) == ["stale", "stale"]


async def test_the_same_message_twice_in_a_list_is_settled_once(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        acking = asyncio.ensure_future(consumer.ack([message, message]))
        (await worker.expect(wire.Ack)).ok()
        assert await acking == ["settled", "stale"]


async def test_leaving_the_block_acks_in_the_background_and_raising_nacks(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    stale: list[Message] = []
    async with Open(worker, shelf, on_stale=stale.append) as consumer:
        worker.link.data(10)
        for message in await take(consumer, 9):
            async with message:
                pass
        (last,) = await take(consumer, 1)
        with pytest.raises(ValueError, match="no good"):
            async with last:
                raise ValueError("no good")
        acks = await worker.expect(wire.Ack)
        assert acks.body == ["", 1, 1, 9]
        nacks = await worker.expect(wire.Nack)
        assert nacks.body == ["", 1, 10, 10]
        assert (nacks.properties.charged, nacks.properties.delay_ms) == (True, None)
        acks.ok(wire.SettleReply(stale=[0, 4, 5]))
        nacks.ok()
        await client_is_quiet(worker)
        assert entries(stale) == [4, 5]


async def test_a_block_in_which_the_message_was_settled_leaves_it_at_that(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        async with await consumer.receive() as message:
            nacking = asyncio.ensure_future(message.nack(delay=timedelta(seconds=2)))
            request = await worker.expect(wire.Nack)
            assert request.properties.delay_ms == 2_000
            request.ok()
            await nacking
        await client_is_quiet(worker)
        assert worker.seen(wire.Ack) == 0


async def test_times_are_relative_or_absolute_and_never_both(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        when = datetime(2030, 1, 1, tzinfo=UTC)
        with pytest.raises(InvalidArgument, match="not both"):
            await message.nack(1, until=when)
        with pytest.raises(InvalidArgument, match="time zone"):
            await message.nack(until=datetime(2030, 1, 1))
        with pytest.raises(InvalidArgument, match="seconds or until"):
            await message.extend()
        with pytest.raises(InvalidArgument, match="delay is -1"):
            await consumer.nack([message], delay=-1)
        extending = asyncio.ensure_future(message.extend(until=when))
        request = await worker.expect(wire.Extend)
        assert request.properties.until_ms == when.timestamp() * 1000
        request.ok(wire.SettleReply(deadline_ms=request.properties.until_ms))
        await extending
        assert abs(message.deadline - when) < timedelta(seconds=1)


@pytest.mark.slow
async def test_a_lease_that_has_ended_here_is_refused_without_asking(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    stale: list[Message] = []
    async with Open(worker, shelf, lease=1.0, auto_extend=False, on_stale=stale.append) as consumer:
        worker.link.data(1, lease=1.0)
        (message,) = await take(consumer, 1)
        await passed(worker, message)
        with pytest.raises(StaleReceipt, match=r"message 0:7-1: its lease"):
            await message.ack()
        async with message:
            pass
        assert stale == [message]
        assert worker.seen(wire.Ack) == 0


async def test_buffered_messages_whose_lease_has_ended_are_dropped(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, auto_extend=False) as consumer:
        worker.link.data([(1, ""), (2, "")], lease=-1.0)
        worker.link.data([(3, "")])
        assert entries(await take(consumer, 1)) == [3]
        await client_is_quiet(worker)
        assert worker.seen(wire.Flow) == 0, "the worker knows by itself"


async def test_what_the_worker_says_has_ended_is_stale_and_not_handed_out(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data([(1, ""), (2, ""), (3, ""), (4, "")], token=5)
        worker.link.data([(5, ""), (6, "")], token=6)
        first, second = await take(consumer, 2)
        worker.link.send(wire.Ended(1, 0, 3), body=wire.pack([5, 2, 3, 6, 5, 5]))
        await client_is_quiet(worker)
        assert entries(await take(consumer, 2)) == [4, 6]
        with pytest.raises(StaleReceipt):
            await second.ack()
        acking = asyncio.ensure_future(first.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking
        assert worker.seen(wire.Flow) == 0


async def test_a_seek_ends_all_leases_up_to_its_token_and_none_after_it(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, mode="exclusive") as consumer:
        worker.link.data([(1, ""), (2, "")], token=5)
        (held,) = await take(consumer, 1)
        worker.link.data([(1, ""), (2, "")], token=8)
        worker.link.send(wire.Ended(1, 0, 2, up_to=7))
        await client_is_quiet(worker)
        assert [(message.token, message.id[-1]) for message in await take(consumer, 2)] == [
            (8, "1"),
            (8, "2"),
        ]
        with pytest.raises(StaleReceipt):
            await held.ack()


async def test_a_settle_is_sent_again_after_the_connection_was_lost(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(2)
        first, second = await take(consumer, 2)
        acking = asyncio.ensure_future(first.ack())
        await worker.expect(wire.Ack)
        worker.link.drop()
        again = await worker.expect_subscriber()
        assert again.properties.consumer == consumer.name
        request = await worker.expect(wire.Ack)
        assert request.body == ["", 1, 1, 1]
        request.ok(wire.SettleReply(stale=[0, 1, 1]))
        with pytest.raises(StaleReceipt, match="or it was settled before and the answer was lost"):
            await acking
        acking = asyncio.ensure_future(second.ack())
        (await worker.expect(wire.Ack)).error("unavailable")
        (await worker.expect(wire.Ack)).ok()
        await acking


# Order


@pytest.mark.slow
async def test_a_nack_voids_what_follows_in_its_lane_only(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf, mode="key_shared") as consumer:
        worker.link.data([(1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "b")])
        first, second, other = await take(consumer, 3)
        nacking = asyncio.ensure_future(first.nack())
        request = await worker.expect(wire.Nack)
        assert request.body == ["=a", 1, 1, 1]
        # On its way before the worker knew of the nack, so void too; then what the nack brings back.
        worker.link.data([(6, "a"), (7, "b")], token=2)
        assert entries(await take(consumer, 2)) == [5, 7]
        request.ok()
        await nacking
        worker.link.data([(1, "a"), (2, "a")], token=3)
        again = await take(consumer, 2)
        assert [(message.token, message.key) for message in again] == [(3, "a"), (3, "a")]
        with pytest.raises(StaleReceipt, match="earlier message of its lane was nacked"):
            await second.ack()
        acking = asyncio.ensure_future(other.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking


@pytest.mark.slow
async def test_of_two_nacks_of_a_lane_the_answer_to_one_lifts_no_guard_of_the_other(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """A pause gives back the tail, the application nacks the head: the tail alone must not reach it."""
    async with Open(worker, shelf, mode="key_shared") as consumer:
        worker.link.data([(1, "a"), (2, "a"), (3, "a")])
        (first,) = await take(consumer, 1)
        pausing = asyncio.ensure_future(consumer.pause())
        tail = await worker.expect(wire.Nack)
        assert tail.body == ["=a", 1, 2, 3]
        await consumer.resume()
        nacking = asyncio.ensure_future(first.nack())
        head = await worker.expect(wire.Nack)
        assert head.body == ["=a", 1, 1, 1]
        tail.ok()
        await pausing
        # Leased again before the worker knew of the second nack, which takes it along.
        worker.link.data([(2, "a"), (3, "a"), (4, "b")], token=2)
        assert entries(await take(consumer, 1)) == [4]
        head.ok()
        await nacking
        worker.link.data([(1, "a"), (2, "a"), (3, "a")], token=3)
        assert entries(await take(consumer, 3)) == [1, 2, 3]


@pytest.mark.slow
async def test_of_two_nacks_of_a_lane_the_later_may_be_answered_first(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, mode="key_shared") as consumer:
        worker.link.data([(1, "a"), (2, "a"), (3, "a")])
        (first,) = await take(consumer, 1)
        pausing = asyncio.ensure_future(consumer.pause())
        tail = await worker.expect(wire.Nack)
        await consumer.resume()
        nacking = asyncio.ensure_future(first.nack())
        (await worker.expect(wire.Nack)).ok()
        await nacking
        worker.link.data([(3, "a"), (4, "b")], token=2)  # before the nack of the tail
        assert entries(await take(consumer, 1)) == [4]
        worker.link.data([(1, "a"), (2, "a"), (3, "a")], token=3)
        again = await take(consumer, 3)
        assert entries(again) == [1, 2, 3]
        # What the first nack has brought back is nacked again: an answer to the old ones says nothing of it.
        nacking = asyncio.ensure_future(again[0].nack())
        head = await worker.expect(wire.Nack)
        tail.ok()
        await pausing
        worker.link.data([(2, "a"), (5, "b")], token=4)
        assert entries(await take(consumer, 1)) == [5]
        head.ok()
        await nacking


@pytest.mark.slow
async def test_a_lane_that_comes_again_before_its_old_deadline_is_seen_counts(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """The broker's clock is a little ahead: what it has delivered again is not given back with the old."""
    async with Open(worker, shelf, mode="key_shared", lease=1.0, auto_extend=False) as consumer:
        worker.link.data([(1, "a"), (2, "a")], lease=1.0)
        old = await take(consumer, 2)
        worker.link.data([(1, "a"), (2, "a")], token=2)
        again = await take(consumer, 2)
        while old[0].deadline > datetime.now(UTC):
            await client_is_quiet(worker)
        await client_is_quiet(worker)
        assert not worker.seen(wire.Nack)
        acking = asyncio.ensure_future(consumer.ack(again))
        request = await worker.expect(wire.Ack)
        assert request.body == ["=a", 2, 1, 2]
        request.ok()
        assert await acking == ["settled"] * 2
        with pytest.raises(StaleReceipt):
            await old[1].ack()


async def test_a_lane_has_one_deadline_that_restarts_at_each_settle(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, mode="exclusive", lease=3600, auto_extend=False) as consumer:
        worker.link.data(2, lease=400)  # with less than a tenth left it would go back, unless taken at once
        first, second = await take(consumer, 2)
        before = second.deadline
        acking = asyncio.ensure_future(first.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking
        assert second.deadline - before > timedelta(minutes=50)


@pytest.mark.parametrize("mode", ["exclusive", "key_shared"])
async def test_a_settle_does_not_cut_an_extension_of_its_lane_short_and_the_next_lease_begins_anew(
    worker: ScriptedWorker, shelf: Shelf, mode: str
) -> None:
    async with Open(worker, shelf, mode=mode, lease=10, auto_extend=False) as consumer:
        worker.link.data([(1, "a"), (2, "a")], lease=10)
        first, second = await take(consumer, 2)
        extending = asyncio.ensure_future(second.extend(3600))
        (await worker.expect(wire.Extend)).ok(wire.SettleReply(deadline_ms=wire_time(worker) + 3_600_000))
        await extending
        for message in (first, second):
            assert second.deadline - datetime.now(UTC) > timedelta(minutes=50)
            acking = asyncio.ensure_future(message.ack())
            (await worker.expect(wire.Ack)).ok()
            await acking
        worker.link.data([(3, "a")], lease=10)
        [third] = await take(consumer, 1)
        assert third.deadline - datetime.now(UTC) < timedelta(seconds=11)


# Leases


@pytest.mark.slow
async def test_leases_are_extended_at_half_their_time_with_ranges_merged(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, lease=2.0) as consumer:
        worker.link.data(5, lease=2.0)
        taken = await take(consumer, 2)
        request = await worker.expect(wire.Extend)
        assert request.body == ["", 1, 1, 5]
        assert request.properties.lease_ms == 2_000
        request.ok(wire.SettleReply(stale=[0, 2, 3], deadline_ms=wire_time(worker) + 60_000))
        await client_is_quiet(worker)
        assert entries(await take(consumer, 2)) == [4, 5]
        assert taken[0].deadline - datetime.now(UTC) > timedelta(seconds=30)
        with pytest.raises(StaleReceipt):
            await taken[1].ack()


async def passed(worker: ScriptedWorker, message: Message) -> None:
    """Wait until a message's deadline has passed, and the client knows it."""
    while message._block.states[message._index] != STALE:
        await client_is_quiet(worker)


@pytest.mark.slow
async def test_one_receipt_extends_a_lane(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf, mode="key_shared", lease=2.0):
        worker.link.data([(1, "a"), (2, "b"), (3, "a"), (4, "")], lease=2.0)
        request = await worker.expect(wire.Extend)
        assert request.body == ["=a", 1, 1, 1, "=b", 1, 2, 2, "", 1, 4, 4]
        request.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 60_000))


@pytest.mark.slow
async def test_an_idle_application_loses_its_leases_after_a_while(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, lease=1.0, auto_extend=1.5) as consumer:
        worker.link.data(2, lease=1.0)
        (message,) = await take(consumer, 1)
        extended = 0
        while message._block.states[message._index] != STALE:
            if worker.seen(wire.Extend):
                request = await worker.expect(wire.Extend)
                request.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 1_000))
                extended += 1
            await client_is_quiet(worker)
        assert extended >= 1
        with pytest.raises(StaleReceipt):
            await message.ack()


async def test_clocks_that_differ_do_not_shorten_leases(worker: ScriptedWorker, shelf: Shelf) -> None:
    worker.drift_ms = -3_600_000
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        acking = asyncio.ensure_future(message.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking


# Flow


async def test_pause_gives_back_what_is_not_handed_out_and_what_is_on_its_way(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(5)
        await take(consumer, 2)
        pausing = asyncio.ensure_future(consumer.pause())
        assert (await worker.expect(wire.Flow)).properties.paused is True
        request = await worker.expect(wire.Nack)
        assert (request.body, request.properties.charged) == (["", 1, 3, 5], False)
        worker.link.data([(6, "")], token=2)
        request.ok()
        await pausing
        late = await worker.expect(wire.Nack)
        assert (late.body, late.properties.charged) == (["", 2, 6, 6], False)
        late.ok()
        await consumer.resume()
        assert (await worker.expect(wire.Flow)).properties.paused is False
        worker.link.data([(3, "")], token=3)
        assert entries(await take(consumer, 1)) == [3]


async def test_at_most_once_is_settled_already_and_makes_room_when_handed_out(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    shelf.bodies = {("orders", f"uid-{entry}"): b"x" for entry in range(1, 4)}
    async with Open(worker, shelf, delivery="at_most_once") as consumer:
        worker.link.data(3, settled=[1, 2], about="1 1  1 ", lease=0)
        first, second, third = await take(consumer, 3)
        assert (await worker.expect(wire.Flow)).properties.permits == 3
        assert await first.data() == b"x"
        await first.ack()
        await second.nack()
        async with third:
            pass
        assert worker.seen(wire.Ack) + worker.seen(wire.Nack) == 0
    assert shelf.bodies == {("orders", "uid-3"): b"x"}, "another subscription still owes it"


async def test_closing_sends_what_is_queued_before_it_leaves(worker: ScriptedWorker, shelf: Shelf) -> None:
    opened = Open(worker, shelf)
    async with opened as consumer:
        worker.link.data(3)
        (message, kept, _) = await take(consumer, 3)
        async with message:
            pass
        closing = asyncio.ensure_future(consumer.close())
        request = await worker.expect(wire.Ack)
        assert worker.seen(wire.Unsubscribe) == 0
        request.ok()
        await worker.expect_leaving()
        await closing
        with pytest.raises(StaleReceipt):
            await kept.ack()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        with pytest.raises(ConnectionClosed, match="closed"):
            await consumer.receive()


async def test_a_consumer_that_closes_leaves_though_an_ack_is_not_answered(
    worker: ScriptedWorker, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the worker keeps it as long as the connection lives, with all that it holds."""
    monkeypatch.setattr("keylane.consume.consumer._CLOSE", 0.1)
    async with Open(worker, shelf) as consumer:
        worker.link.data(2)
        (message, _) = await take(consumer, 2)
        acking = asyncio.ensure_future(message.ack())
        await worker.expect(wire.Ack)
        await consumer.close()
        with pytest.raises(ConnectionClosed):
            await acking
        left = await worker.expect(wire.Unsubscribe)
        assert left.properties.partitions == [0]
        assert worker.seen(wire.Unsubscribe) == 0, "once"


# Losing the worker


async def test_after_a_reconnect_nothing_that_is_still_held_is_handed_out_twice(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(4, token=5)
        first, second = await take(consumer, 2)
        worker.link.drop()
        again = await worker.expect_subscriber()
        assert (again.properties.stream, again.properties.consumer) == (1, consumer.name)
        # Entry 2 has been given to somebody else and come back; 9 is one whose delivery was lost.
        worker.link.data([(1, ""), (3, ""), (4, "")], token=5, held=True)
        worker.link.data([(2, ""), (9, "")], token=6, held=True)
        rest = await take(consumer, 4)
        assert sorted((message.token, *entries([message])) for message in rest) == [
            (5, 3),
            (5, 4),
            (6, 2),
            (6, 9),
        ]
        with pytest.raises(StaleReceipt):
            await second.ack()
        acking = asyncio.ensure_future(first.ack())
        request = await worker.expect(wire.Ack)
        assert request.body == ["", 5, 1, 1]
        request.ok()
        await acking


async def test_what_is_settled_while_the_worker_lists_it_is_not_handed_out_again(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(3, token=5)
        taken = await take(consumer, 3)
        acking = asyncio.ensure_future(consumer.ack(taken[:2]))
        await worker.expect(wire.Ack)
        worker.link.drop()
        await worker.expect_subscriber()
        (await worker.expect(wire.Ack)).ok()
        worker.link.data(4, token=5, held=True)
        assert await acking == ["settled", "settled"]
        assert entries(await take(consumer, 1)) == [4]


async def test_what_is_listed_without_a_reconnect_is_handed_out_once(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(2, token=5)
        worker.link.data(3, token=5, held=True)
        assert entries(await take(consumer, 3)) == [1, 2, 3]
        worker.link.data([(4, ""), (5, "")], token=6, held=True, settled=[4, 5], lease=0)
        four, five = await take(consumer, 2)
        await four.ack()
        assert await consumer.ack([five]) == ["settled"]
        assert worker.seen(wire.Ack) == 0


async def test_an_empty_list_of_what_is_held_is_no_message(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data([], held=True)
        worker.link.data(1)
        assert entries(await take(consumer, 1)) == [1]


async def test_lists_that_do_not_belong_together_end_the_connection(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.send(wire.Data(1, 0, 1, 1, "1:1"), body=wire.pack(([1, 9], ["k"], [], [])))
        await worker.expect_subscriber()
        worker.link.data(1)
        assert entries(await take(consumer, 1)) == [1]


async def test_a_pause_outlives_the_connection(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf) as consumer:
        await consumer.pause()
        await worker.expect(wire.Flow)
        worker.link.drop()
        await worker.expect_subscriber()
        assert (await worker.expect(wire.Flow)).properties.paused is True


async def test_a_consumer_that_the_worker_ends_for_good_raises_why(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1)
        (message,) = await take(consumer, 1)
        waiting = asyncio.ensure_future(consumer.receive())
        worker.link.send(wire.Error("subscription_not_found", "'billing' was deleted", stream=1))
        with pytest.raises(SubscriptionNotFound, match="'billing' was deleted"):
            await waiting
        with pytest.raises(SubscriptionNotFound):
            await consumer.wait()
        with pytest.raises(StaleReceipt):
            await message.ack()


async def test_a_consumer_whose_name_another_took_does_not_take_it_back(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.send(wire.Error("consumer_replaced", "taken over", stream=1))
        with pytest.raises(ConsumerReplaced, match="taken over"):
            await consumer.receive()
        await client_is_quiet(worker)
        assert worker.seen(wire.Subscribe) == 0


async def test_a_consumer_that_the_worker_ends_for_a_moment_subscribes_again(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.send(wire.Error("unavailable", "Redis is away", stream=1))
        (await worker.expect(wire.Subscribe)).error("unavailable")
        await worker.expect_subscriber()
        worker.link.data(1)
        assert entries(await take(consumer, 1)) == [1]


async def test_a_subscription_that_is_busy_is_told_when_opening(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        opening = asyncio.ensure_future(client.subscribe("orders", "billing").__aenter__())
        (await worker.expect(wire.Subscribe)).error("subscription_busy", "c1 has it")
        with pytest.raises(SubscriptionBusy, match="c1 has it"):
            await opening


async def test_data_that_comes_with_the_answer_is_not_lost(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        consumer = client.subscribe("orders", "billing", permits=7, lease=5, name="me", partitions=[2, 3])
        opening = asyncio.ensure_future(consumer.__aenter__())
        request = await worker.expect_subscriber()
        worker.link.data(2, partition=3)
        asked = request.properties
        assert (asked.permits, asked.lease_ms, asked.consumer, asked.partitions) == (7, 5_000, "me", [2, 3])
        assert (asked.mode, asked.start) == ("shared", "latest")
        await opening
        assert entries(await take(consumer, 2)) == [1, 2]
        closing = asyncio.ensure_future(consumer.close())
        await worker.expect_leaving()
        await closing


# Bodies


def many_bodies(shelf: Shelf, count: int) -> None:
    shelf.bodies = {("orders", f"uid-{entry}"): b"%d" % entry for entry in range(1, count + 1)}


async def test_the_bodies_of_a_block_come_together_before_they_are_asked_for(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    many_bodies(shelf, 250)
    async with Open(worker, shelf) as consumer:
        worker.link.data(250, about="1 1  3 ")
        taken = await take(consumer, 250)
        await until(lambda: shelf.gets == [250])
        assert await asyncio.gather(*(message.data() for message in taken[:10])) == [
            b"%d" % entry for entry in range(1, 11)
        ]
        assert [await message.data() for message in taken] == [b"%d" % entry for entry in range(1, 251)]
        assert shelf.gets == [250]


async def test_large_bodies_do_not_come_before_they_are_asked_for(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    """Beyond four megabytes that the application has not taken: that much is a limit for all its blocks."""
    many_bodies(shelf, 11)
    async with Open(worker, shelf) as consumer:
        worker.link.data([(entry, "") for entry in range(1, 4)], token=1, about="1 1  1500000 ")
        worker.link.data([(entry, "") for entry in range(4, 10)], token=2, about="1 1  1500000 ")
        await client_is_quiet(worker)
        first = await take(consumer, 3)
        assert [await message.data() for message in first] == [b"1", b"2", b"3"]
        assert shelf.gets == [2, 1]
        worker.link.data([(entry, "") for entry in range(10, 12)], token=3, about="1 1  1500000 ")
        await until(lambda: shelf.gets == [2, 1, 2])


async def test_bodies_that_nobody_asks_for_stay_where_they_are(worker: ScriptedWorker, shelf: Shelf) -> None:
    many_bodies(shelf, 3_000)
    async with Open(worker, shelf, permits=3_000) as consumer:
        for token in range(3):
            entries = range(token * 600 + 1, token * 600 + 601)
            worker.link.data([(entry, "") for entry in entries], token=token + 1, about="1 1  3 ")
        taken = await take(consumer, 1_800)
        await client_is_quiet(worker)
        assert sum(shelf.gets) == 1_200, "then it seems that nobody will"
        assert await taken[-1].data() == b"1800"
        worker.link.data([(entry, "") for entry in range(1801, 1901)], token=4, about="1 1  3 ")
        await take(consumer, 100)
        await until(lambda: sum(shelf.gets) == 1_301)


async def test_the_bodies_of_blocks_that_come_together_come_together(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    many_bodies(shelf, 30)
    async with Open(worker, shelf) as consumer:
        for entry in range(1, 31):
            worker.link.data([(entry, "")], token=entry, about="1 1  3 ")
        await client_is_quiet(worker)
        assert len(shelf.gets) < 5
        assert [await message.data() for message in await take(consumer, 30)] == list(shelf.bodies.values())
        assert sum(shelf.gets) == 30


async def test_a_body_that_the_store_chokes_on_harms_none_of_those_that_came_with_it(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    class Choking(Shelf):
        async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
            if "uid-2" in names:
                raise ValueError("what is this?")
            return await super().get(topic, names)

    shelf = Choking()
    many_bodies(shelf, 3)
    async with Open(worker, shelf) as consumer:
        for entry in range(1, 4):
            worker.link.data([(entry, "")], token=entry, about="1 1  3 ")
        first, second, third = await take(consumer, 3)
        assert await first.data() == b"1"
        with pytest.raises(ValueError, match="what is this"):
            await second.data()
        assert await third.data() == b"3"


async def test_a_body_that_the_store_chokes_on_harms_none_of_its_block(worker: ScriptedWorker) -> None:
    class Choking(Shelf):
        async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
            if "uid-7" in names:
                raise ValueError("what is this?")
            return await super().get(topic, names)

    shelf = Choking()
    many_bodies(shelf, 10)
    async with Open(worker, shelf) as consumer:
        worker.link.data(10, about="1 1  3 ")
        messages = await take(consumer, 10)
        chokes = messages.pop(6)
        assert [await message.data() for message in messages] == [
            body for (_, name), body in shelf.bodies.items() if name != "uid-7"
        ]
        with pytest.raises(ValueError, match="what is this"):
            await chokes.data()


async def test_what_could_not_be_fetched_ahead_is_fetched_when_it_is_asked_for(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    many_bodies(shelf, 2)
    shelf.trouble = [Unavailable("not now")]
    async with Open(worker, shelf) as consumer:
        worker.link.data(2, about="1 1  3 ")
        first, second = await take(consumer, 2)
        await until(lambda: not shelf.trouble)
        await client_is_quiet(worker)
        assert await first.data() == b"1"
        assert await second.data() == b"2"
        assert shelf.gets == [2, 2]


async def test_the_bodies_of_a_batch_come_together(worker: ScriptedWorker, shelf: Shelf) -> None:
    shelf.bodies = {("orders", f"uid-{entry}"): b"%d" % entry for entry in range(1, 301)}
    async with Open(worker, shelf) as consumer:
        worker.link.data(300, about="1 1  3 ")
        batch = await anext(consumer.batches())
        assert await batch.data() == [b"%d" % entry for entry in range(1, 301)]
        assert shelf.gets == [250, 50]


async def test_a_body_that_is_gone_is_named_and_its_message_stays_leased(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(1, about="1 1  3:other-name ")
        (message,) = await take(consumer, 1)
        with pytest.raises(PayloadMissing, match=r"message 0:7-1 of 'orders' is not in Shelf"):
            await message.data()
        acking = asyncio.ensure_future(message.ack())
        (await worker.expect(wire.Ack)).ok()
        await acking


async def test_an_ack_names_the_bodies_of_its_messages(worker: ScriptedWorker, shelf: Shelf) -> None:
    """The worker need not look for them, should they be the last ones who are owed them."""
    async with Open(worker, shelf) as consumer:
        worker.link.data(2, about="1 1  1 ")
        worker.link.data([(3, "")], token=2)
        worker.link.data([(4, "")], token=3, about="1 1  1:elsewhere ")
        acking = asyncio.ensure_future(consumer.ack(await take(consumer, 4)))
        request = await worker.expect(wire.Ack)
        assert request.properties.bodies == [1, "uid-1", 2, "uid-2", 4, "elsewhere"]
        request.ok()
        await acking


async def test_bodies_are_deleted_when_a_worker_says_so_and_then_it_is_told(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    shelf.bodies = {("orders", f"uid-{entry}"): b"x" for entry in range(1, 5)}
    async with Open(worker, shelf):
        worker.link.send(wire.DeleteBodies("orders"), sequence=77, body=wire.pack(["uid-1", "uid-4", "gone"]))
        assert (await worker.expect(wire.Properties)).frame.sequence == 77
        assert shelf.bodies.keys() == {("orders", "uid-2"), ("orders", "uid-3")}


# What is easily lost or stuck


@pytest.mark.slow
async def test_leases_are_extended_however_long_the_application_may_take(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, lease=2.0, auto_extend=timedelta(days=10_000)) as consumer:
        worker.link.data(1, lease=2.0)
        await take(consumer, 1)
        request = await worker.expect(wire.Extend)
        request.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 60_000))


async def test_what_falls_due_while_an_extension_is_under_way_is_extended_next(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, lease=8.0):
        worker.link.data([(1, "")], token=1, lease=3.0)
        first = await worker.expect(wire.Extend)
        worker.link.data([(2, "")], token=2, lease=3.0)
        for _ in range(10):  # its time to be extended comes, and goes
            await client_is_quiet(worker)
        first.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 60_000))
        second = await worker.expect(wire.Extend)
        assert second.body == ["", 2, 2, 2]
        second.ok(wire.SettleReply(deadline_ms=wire_time(worker) + 60_000))


async def test_an_extension_that_an_ack_overtakes_does_not_make_it_stale(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf) as consumer:
        worker.link.data(2)
        first, second = await take(consumer, 2)
        done = asyncio.gather(first.ack(), second.extend(60), second.ack())
        acked, extended = await worker.expect(wire.Ack), await worker.expect(wire.Extend)
        assert acked.body == ["", 1, 1, 2]
        acked.ok()
        extended.ok(wire.SettleReply(stale=[0, 2, 2], deadline_ms=wire_time(worker) + 60_000))
        await done
        await client_is_quiet(worker)
        assert worker.seen(wire.Flow) == 0, "its permit came back with the ack"


async def test_what_could_not_be_settled_in_the_background_is_let_go(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    stale: list[Message] = []
    async with Open(worker, shelf, lease=0.4, on_stale=stale.append) as consumer:
        worker.link.data(1, lease=60)
        (message,) = await take(consumer, 1)
        async with message:
            pass
        (await worker.expect(wire.Ack)).error("broker_error")
        while not stale:
            await client_is_quiet(worker)
        assert stale == [message]


async def test_leaving_a_block_while_the_consumer_closes_tells_on_stale(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    stale: list[Message] = []
    async with Open(worker, shelf, on_stale=stale.append) as consumer:
        worker.link.data(2)
        first, second = await take(consumer, 2)
        async with first:
            pass
        async with second:
            closing = asyncio.ensure_future(consumer.close())
            request = await worker.expect(wire.Ack)
        assert stale == [second]
        request.ok()
        await worker.expect_leaving()
        await closing


async def test_who_waits_for_a_body_when_the_consumer_closes_is_told(worker: ScriptedWorker) -> None:
    class Stuck(Shelf):
        async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
            await asyncio.Event().wait()
            raise AssertionError

    async with Open(worker, Stuck()) as consumer:
        worker.link.data(1, about="1 1  1 ")
        (message,) = await take(consumer, 1)
        reading = asyncio.ensure_future(message.data())
        closing = asyncio.ensure_future(consumer.close())
        await worker.expect_leaving()
        await closing
        with pytest.raises(ConnectionClosed, match="consumer was closed"):
            await reading


async def test_a_batch_has_at_least_one_message_and_waits_for_no_more_than_there_are_permits(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with Open(worker, shelf, permits=3) as consumer:
        with pytest.raises(InvalidArgument, match="max_messages"):
            consumer.batches(max_messages=0)
        worker.link.data(3)
        batch = await asyncio.wait_for(anext(consumer.batches(max_messages=100, max_wait=3600)), PATIENCE)
        assert len(batch) == 3


async def test_a_consumer_that_is_cancelled_while_it_opens_leaves(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        opening = asyncio.ensure_future(client.subscribe("orders", "billing").__aenter__())
        request = await worker.expect(wire.Subscribe)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert worker.seen(wire.Unsubscribe) == 0
        request.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 1))
        await worker.expect_leaving()


async def test_a_pause_keeps_what_cannot_go_back_until_it_ends(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with Open(worker, shelf, delivery="at_most_once") as consumer:
        worker.link.data(3, settled=[], lease=0)
        assert entries(await take(consumer, 1)) == [1]
        await consumer.pause()
        worker.link.data([(4, "")], token=2, settled=[], lease=0)
        await client_is_quiet(worker)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0)
        waiting = asyncio.ensure_future(consumer.receive(timeout=PATIENCE))
        await consumer.resume()
        assert entries([await waiting, *await take(consumer, 2)]) == [2, 3, 4]


async def test_at_most_once_bodies_that_could_not_be_read_stay(worker: ScriptedWorker) -> None:
    class Choking(Shelf):
        chokes = True

        async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
            if self.chokes:
                raise ValueError("not today")
            return await super().get(topic, names)

    shelf = Choking()
    many_bodies(shelf, 2)
    async with Open(worker, shelf, delivery="at_most_once") as consumer:
        worker.link.data([(1, ""), (2, "")], settled=[1, 2], about="1 1  3 ", lease=0)
        first, second = await take(consumer, 2)
        with pytest.raises(ValueError, match="not today"):
            await first.data()
        shelf.chokes = False
        assert [await first.data(), await second.data()] == [b"1", b"2"]


async def test_at_most_once_bodies_go_when_they_have_been_read(worker: ScriptedWorker, shelf: Shelf) -> None:
    shelf.bodies = {("orders", f"uid-{entry}"): b"x" for entry in range(1, 5)}
    async with Open(worker, shelf, delivery="at_most_once") as consumer:
        worker.link.data([(1, ""), (2, "")], settled=[1, 1], about="1 1  1 ", lease=0)
        worker.link.data([(3, ""), (4, "")], settled=[3, 4], about="1 1  1 ", lease=0)
        first, _ = await take(consumer, 2)
        assert [await first.data(), await first.data()] == [b"x", b"x"]
        batch = await anext(consumer.batches())
        assert await batch.data() == [b"x", b"x"]
        assert await batch[0].data() == b"x"
    assert shelf.bodies == {("orders", "uid-2"): b"x"}, "another subscription still owes it"
