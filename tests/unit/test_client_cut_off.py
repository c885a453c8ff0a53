"""A consumer that hears nothing of a partition: what it holds there may be with others after a session."""

from collections.abc import AsyncIterator
from time import monotonic

import anyio
import pytest

from keylane import wire
from tests.support.scripted_client import Open, Shelf, client_is_quiet, entries, take
from tests.support.scripted_worker import Request, ScriptedWorker
from tests.support.waiting import until

SESSION = 0.02  # seconds
THREE = [(1, "k"), (2, "k"), (3, "k")]


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(session_ms=round(SESSION * 1000)) as worker:
        yield worker


async def lose(worker: ScriptedWorker, how: str) -> Request:
    """Serve the consumer no more, for longer than a session; answers its wish to come back."""
    if how == "moved":
        worker.link.send(wire.Redirect("orders", 0, worker.address, 1, 0))
    else:
        worker.link.drop()
    asked = await worker.expect(wire.Subscribe)
    late = monotonic() + SESSION
    await until(lambda: monotonic() > late)
    return asked


def let_in(asked: Request, mode: str, held: list[tuple[int, str]]) -> None:
    """Let a consumer come back, to which so much is still leased."""
    asked.ok(wire.SubscribeReply(mode, "at_least_once", 30_000, 1, len(held)))
    if held:
        asked.link.data(held, token=5, held=True)


@pytest.mark.parametrize("how", ["lost", "moved"])
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
@pytest.mark.parametrize("ours", [True, False])
async def test_nothing_is_handed_out_until_the_worker_says_whose_it_is(
    worker: ScriptedWorker, mode: str, how: str, ours: bool
) -> None:
    async with Open(worker, Shelf(), mode=mode) as consumer:
        worker.link.data(THREE, token=5)
        (first,) = await take(consumer, 1)
        asked = await lose(worker, how)
        found = []

        async def receive() -> None:
            found.extend(await take(consumer, 1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await client_is_quiet(worker)
            assert not found, "it may be with another"
            let_in(asked, mode, THREE if ours else [])
            if not ours:
                worker.link.data([(4, "k")], token=9)
        assert entries(found) == [2 if ours else 4]
        if ours:
            assert entries(await take(consumer, 1)) == [3]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.ack)
                (await worker.expect(wire.Ack)).ok(wire.SettleReply([]))


@pytest.mark.parametrize("how", ["lost", "moved"])
async def test_nor_what_was_taken_to_be_handed_out_later(worker: ScriptedWorker, how: str) -> None:
    async with Open(worker, Shelf(), mode="key_shared") as consumer:
        worker.link.data(THREE, token=5)
        before = await consumer.pull(3)
        asked = await lose(worker, how)
        assert [await consumer.hand(message) for message in before] == [False] * 3
        let_in(asked, "key_shared", THREE)
        again = list(await consumer.pull(3))
        assert entries(again) == [1, 2, 3]
        assert [await consumer.hand(message) for message in before] == [False] * 3
        assert [await consumer.hand(message) for message in again] == [True] * 3


async def test_within_a_session_a_consumer_goes_on_with_what_it_has(worker: ScriptedWorker) -> None:
    worker.info["session_ms"] = 600_000
    async with Open(worker, Shelf(), mode="key_shared") as consumer:
        worker.link.data(THREE, token=5)
        await take(consumer, 1)
        asked = await lose(worker, "lost")
        assert entries(await take(consumer, 2)) == [2, 3]
        let_in(asked, "key_shared", THREE)


async def test_what_a_worker_sends_before_it_lists_what_is_ours_does_not_overtake_that(
    worker: ScriptedWorker,
) -> None:
    """It had the partition before, and then another, whose messages never came: 1 and 2."""
    async with Open(worker, Shelf(), mode="key_shared") as consumer:
        worker.link.send(wire.Redirect("orders", 0, worker.address, 1, 0))
        asked = await worker.expect(wire.Subscribe)
        asked.link.data([(3, "k")], token=9)
        asked.ok(wire.SubscribeReply("key_shared", "at_least_once", 30_000, 1, 3))
        asked.link.data([(1, "k"), (2, "k")], token=5, held=True)
        asked.link.data([(3, "k")], token=9, held=True)
        asked.link.data([(4, "k")], token=10)
        assert entries(await take(consumer, 4)) == [1, 2, 3, 4]


async def test_what_is_settled_before_it_comes_is_not_listed_and_counts(worker: ScriptedWorker) -> None:
    async with Open(worker, Shelf(), delivery="at_most_once") as consumer:
        worker.link.send(wire.Redirect("orders", 0, worker.address, 1, 0))
        asked = await worker.expect(wire.Subscribe)
        asked.link.data([(3, "k")], token=9, settled=[])
        asked.ok(wire.SubscribeReply("shared", "at_most_once", 30_000, 1, 0))
        asked.link.data([(4, "k")], token=10, settled=[])
        assert entries(await take(consumer, 2)) == [3, 4]
