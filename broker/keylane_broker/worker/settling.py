"""Settles what consumers were sent: acks, nacks and extensions of leases, and the room that they make."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import InvalidArgument, SubscriptionNotFound, Unavailable
from keylane_broker.engine.bodies import names_within, pack_names
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import Receipts, receipts_of
from keylane_broker.engine.values import Lease, SettleResult
from keylane_broker.store.keys import PLACE
from keylane_broker.worker.body_deletion import DeletingClient
from keylane_broker.worker.clock import instant
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply

# Bounded before memory is set aside.
_RECEIPTS = Annotated[list[str | int], Meta(max_length=wire.MAX_BATCH * 4)]


async def settle(
    context: Context,
    connection: DeletingClient,
    consumer: Consumer,
    request: wire.Ack | wire.Nack | wire.Extend,
    receipts: Receipts,
) -> SettleResult:
    """Settle messages of one partition, or extend their leases."""
    if request.partition not in consumer.partitions | consumer.left:
        raise InvalidArgument(f"stream {request.stream} has not subscribed to partition {request.partition}")
    partition = context.partitions.get(consumer.topic, request.partition)
    if request.partition in consumer.left:  # it has come back: the client is about to be let in again
        raise Unavailable(f"the consumer is not subscribed to partition {request.partition} here any more")
    name, whose = consumer.subscription, consumer.name
    dispatcher = partition.dispatchers.get(name)
    nacked = isinstance(request, wire.Nack)

    def present() -> Consumer:
        # Its connection may have ended meanwhile, and another have the name and what it holds.
        return context.partitions.consumers.get(*consumer.identity) or consumer

    counts = context.engine.store.counters.subscription(consumer.topic, name)

    def make_room(done: Receipts, result: SettleResult) -> None:
        stale = sum(part.last - part.first + 1 for part in result.stale)
        counts.stale += stale
        if isinstance(request, wire.Ack):
            counts.acked += done.messages - stale
        elif isinstance(request, wire.Nack) and request.charged:
            counts.nacked += done.messages - stale
        else:
            counts.released += done.messages - stale
        _make_room(present(), request.partition, done, result, result.returned if nacked else None)

    async def call(step: Callable[[Engine, Lease], Awaitable[SettleResult]]) -> SettleResult:
        try:
            return await partition.call(step, consumer.incarnation)
        except SubscriptionNotFound as error:
            if PLACE not in name:
                raise
            raise Unavailable("the session of the consumer has ended, and its place with it") from error
        except Unavailable:  # and yet it may have been done
            if dispatcher is not None:
                dispatcher.recount([present()])
            raise

    if isinstance(request, wire.Extend):
        result = await call(
            lambda engine, lease: engine.extend(
                lease,
                name,
                receipts,
                lease_ms=request.lease_ms,
                until_ms=request.until_ms,
                at_ms=context.clock.now_ms(),
                consumer=whose,
            )
        )
        if dispatcher is not None:
            dispatcher.expect(instant(result.deadline_ms, result.now_ms))
        return result
    if isinstance(request, wire.Ack):
        bodies = known_bodies(request)
        names = _names(bodies)
        result = await call(
            lambda engine, lease: engine.ack(lease, name, receipts, names, consumer=whose, on_step=make_room)
        )
        for record, entries in result.records:
            gone = names_within(bodies or [], entries)
            context.bodies.recorded(connection, (consumer.topic, request.partition), record, gone)
    else:
        result = await call(
            lambda engine, lease: engine.nack(
                lease,
                name,
                receipts,
                delay_ms=request.delay_ms,
                until_ms=request.until_ms,
                charged=request.charged,
                reason=request.reason,
                consumer=whose,
                on_step=make_room,
            )
        )
    if dispatcher is not None and (dispatcher.ordered or nacked):
        if nacked:
            # What was leased before goes out before: behind the answer it would pass for a new lease.
            await dispatcher.wait_for_fetch()
        dispatcher.may_have_work_for(consumer)  # what is left of its lanes can be served, now or later
        dispatcher.notify()
    return result


def reply_to(result: SettleResult) -> Reply:
    """Return what to answer."""
    return wire.SettleReply(
        [number for stale in result.stale for number in stale],
        result.deadline_ms,
        [number for part in result.returned for number in part],
    ), b""


def receipts_in(body: memoryview) -> Receipts:
    """Return the receipts of a frame, checked."""
    return receipts_of(wire.unpack(body, _RECEIPTS))


def known_bodies(request: wire.Ack) -> list[int | str] | None:
    """Return the bodies that a client names, checked; None if they are to be looked up.

    A name after an "@" is that of a body of another topic, as dead letters have it: it is not taken on trust.
    Nor is a very long one: producers may call bodies so, but what an ACK says is stored, and is to be short.
    """
    bodies = request.bodies
    if not bodies:
        return bodies
    entries, names = bodies[::2], bodies[1::2]
    if len(bodies) % 2 or set(map(type, entries)) != {int} or set(map(type, names)) != {str}:
        raise InvalidArgument("bodies are entry, name, …")
    text = "\n".join(["", *names])  # type: ignore[list-item]
    return None if "\n@" in text or max(map(len, names)) > wire.MAX_UID else bodies  # type: ignore[arg-type]


def _names(bodies: list[int | str] | None) -> str | None:
    """Return entry and name of each body as the scripts want them; None where nothing is said."""
    if not bodies:
        return None if bodies is None else ""
    return pack_names(bodies)


def _make_room(
    consumer: Consumer,
    partition: int,
    done: Receipts,
    result: SettleResult,
    returned: list[tuple[int, int, int]] | None,
) -> None:
    """Only what was leased to the consumer, and is no more, has given its permits back.

    So step by step: to one that comes back in between, what was settled before is not out.
    """
    if partition in consumer.listing:
        consumer.listing[partition] += done.settled_parts(result.stale) if returned is None else returned
    elif returned is not None:
        consumer.take_back(sum(last - first + 1 for _, first, last in returned), partition)
    else:
        stale = sum(part.last - part.first + 1 for part in result.stale)
        consumer.take_back(done.messages - stale, partition)
