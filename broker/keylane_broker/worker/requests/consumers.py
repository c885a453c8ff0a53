"""What consumers ask: to be opened and closed, and to settle what they were sent."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import (
    ConnectionClosed,
    InvalidArgument,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicReplaced,
    Unavailable,
)
from keylane_broker.cluster.membership import NotOwner
from keylane_broker.engine.answers import by_position, check_incarnation, made_anew
from keylane_broker.engine.bodies import names_within, pack_names
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.codec import count_messages, without
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import Receipts, receipts_of
from keylane_broker.engine.values import Delivery, Lease, SettleResult, SubscriptionSettings
from keylane_broker.limits import MAX_MS, MAX_PERMITS
from keylane_broker.store.keys import check_name
from keylane_broker.worker.clock import instant
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.requests.topics import DONE, Reply, create_at

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker

# Bounded before memory is set aside.
_RECEIPTS = Annotated[list[str | int], Meta(max_length=wire.MAX_BATCH * 4)]


async def subscribe(
    worker: "Worker", connection: "Connection", request: wire.Subscribe, _: memoryview
) -> Reply:
    check_name("consumer", request.consumer)
    check_int("permits", request.permits, 0, MAX_PERMITS)
    open_there = connection.streams.get(request.stream)
    other = open_there is not None and open_there.identity != (
        request.topic,
        request.subscription,
        request.consumer,
    )
    if other or request.stream in connection.opening:
        raise InvalidArgument(f"stream {request.stream} is in use on this connection")
    connection.opening.add(request.stream)
    try:
        return await _open(worker, connection, request)
    finally:
        connection.opening.discard(request.stream)


async def _open(worker: "Worker", connection: "Connection", request: wire.Subscribe) -> Reply:
    about = await worker.engine.describe_topic(request.topic)
    check_incarnation(request.topic, request.incarnation, about.incarnation)
    count = about.partitions
    numbers = list(range(count)) if request.partitions is None else sorted(set(request.partitions))
    if not numbers:
        raise InvalidArgument("a consumer needs at least one partition")
    for number in (numbers[0], numbers[-1]):
        check_int("partition", number, 0, count - 1)
    settings = await _settings_of(worker, request)
    try:
        for number in numbers:
            worker.partition(request.topic, number)
    except NotOwner:  # the worker before may have sent it here, and we have not heard yet
        await worker.member.refresh()
    for number in numbers:
        await worker.partition(request.topic, number).lease_of(about.incarnation)  # or another worker has it
    lease_ms = settings.lease_ms if request.lease_ms is None else request.lease_ms
    check_int("lease_ms", lease_ms, 1, MAX_MS)

    if not connection.alive:
        raise ConnectionClosed("the connection ended before the consumer was open")
    consumer = connection.streams.get(request.stream)
    if consumer is None:
        consumer = _take_over(worker, Consumer(connection, request, lease_ms, about.incarnation))
        consumer.at_most_once = settings.delivery == "at_most_once"
    check_incarnation(request.topic, consumer.incarnation, about.incarnation)
    for number in numbers:
        consumer.reopen(number)  # if it is open
    consumer.partitions.update(numbers)
    consumer.left.difference_update(numbers)
    consumer.listing.update({number: [] for number in numbers})
    try:
        try:
            held = await _join(worker, consumer, settings, numbers)
        except SubscriptionNotFound:  # it was deleted since, or a partition has lost it
            if not await worker.engine.mend_subscription(request.topic, request.subscription):
                raise
            settings = await _settings_of(worker, request)
            held = await _join(worker, consumer, settings, numbers)
        held = {number: without(found, consumer.listing[number]) for number, found in held.items()}
    except BaseException:
        consumer.partitions.difference_update(numbers)
        consumer.left.update(numbers)
        if not consumer.partitions:
            consumer.forget()
        raise
    finally:
        for number in numbers:
            consumer.listing.pop(number, None)
    counts = {number: count_messages(deliveries) for number, deliveries in held.items()}
    for number, messages in counts.items():
        consumer.count(number, messages)
    # Once this has been answered: what the client asks then is younger than what is held.
    asyncio.get_running_loop().call_soon(_begin, worker, consumer, settings, held)
    found = {number: worker.partitions.get((request.topic, number)) for number in numbers}
    epochs = {number: partition.epoch for number, partition in found.items() if partition}
    return wire.SubscribeReply(
        settings.mode,
        settings.delivery,
        lease_ms,
        count,
        sum(counts.values()),
        epochs,
        settings.incarnation,
    ), b""


def _take_over(worker: "Worker", consumer: Consumer) -> Consumer:
    """Let a consumer be the one of its name."""
    before = worker.consumers.get(consumer.identity)
    if before is not None:
        before.end("consumer_replaced", f"another connection took over as consumer {consumer.name!r}")
    worker.consumers[consumer.identity] = consumer.connection.streams[consumer.stream] = consumer
    return consumer


async def _settings_of(worker: "Worker", request: wire.Subscribe) -> SubscriptionSettings:
    """The settings of the subscription, made if it is not there, unless it was there before."""
    engine, known = worker.engine, request.subscription_incarnation
    if request.mode == "cursor":
        raise InvalidArgument(by_position(request.topic, request.subscription))
    try:
        found = await engine.describe_subscription(request.topic, request.subscription)
        if known not in (0, found.incarnation):
            raise SubscriptionNotFound(made_anew(request.topic, request.subscription))
        if found.mode == "cursor":
            raise InvalidArgument(by_position(request.topic, request.subscription))
        if request.mode is None or found.mode == request.mode:
            return found
    except SubscriptionNotFound:
        if known:
            raise
    made = SubscriptionSettings(request.mode or "shared")
    if request.lease_ms is not None:
        made = SubscriptionSettings(made.mode, lease_ms=request.lease_ms)
    # Of another mode, this names the one that it has.
    await create_at(worker, request.topic, request.subscription, made, request.start, exist_ok=True)
    return await engine.describe_subscription(request.topic, request.subscription)


async def _join(
    worker: "Worker", consumer: Consumer, settings: SubscriptionSettings, numbers: list[int]
) -> dict[int, list[Delivery]]:
    """Open the consumer's session on each partition; answers what its name holds there.

    The first partition decides who is alone on an exclusive subscription.
    """

    opened: list[int] = []

    async def join(number: int) -> list[Delivery]:
        partition = worker.partition(consumer.topic, number)
        await partition.spare(consumer.subscription)
        was_open = await partition.call(
            lambda engine, lease: engine.join(lease, consumer.subscription, consumer.name, worker.session_ms),
            consumer.incarnation,
        )
        dispatcher = partition.dispatcher(consumer.subscription, settings.mode, settings.delivery)
        if not dispatcher.consumers:
            dispatcher.wake()  # it ends the session, should the consumer go before it is served
        if not was_open:
            opened.append(number)
            return []
        held = await partition.held_by(consumer.subscription, consumer.name, consumer.incarnation)
        if held and settings.delivery == "at_most_once":
            # Leased and never sent, or it would be settled: to be fetched once more.
            await partition.call(
                lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name),
                consumer.incarnation,
            )
            return await join(number)
        return held

    began = monotonic()
    first, *others = numbers
    joined = [
        await join(first),
        *await asyncio.gather(*(join(number) for number in others), return_exceptions=True),
    ]
    held = [found for found in joined if not isinstance(found, BaseException)]
    for failure in joined:
        if isinstance(failure, SubscriptionBusy):
            for number in opened:  # let them in who come next: this one may not come again under its name
                await worker.partition(consumer.topic, number).call(
                    lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name),
                    consumer.incarnation,
                )
        if isinstance(failure, BaseException):
            raise failure
    if monotonic() - began > worker.session_ms / 3_000:  # nobody has renewed what was joined first
        for number in numbers:
            await worker.partition(consumer.topic, number).call(
                lambda engine, lease: engine.touch(
                    lease, consumer.subscription, [consumer.name], worker.session_ms
                ),
                consumer.incarnation,
            )
    return dict(zip(numbers, held, strict=True))


def _begin(
    worker: "Worker", consumer: Consumer, settings: SubscriptionSettings, held: dict[int, list[Delivery]]
) -> None:
    """Hand a consumer what its name still holds, and then serve it."""
    if not consumer.connection.alive:
        consumer.forget()
    for number in held:
        if worker.consumers.get(consumer.identity) is not consumer:
            return  # it has ended, or another has taken over
        try:
            partition = worker.partition(consumer.topic, number)
        except NotOwner as gone:
            consumer.part(number, gone.address)
            continue
        except Unavailable:
            return  # the worker is stopping
        if partition.incarnation != consumer.incarnation:
            consumer.end(TopicReplaced.code, f"topic {consumer.topic!r} was made anew")
            return
        dispatcher = partition.dispatcher(consumer.subscription, settings.mode, settings.delivery)
        dispatcher.hand_back(consumer, held[number])
        dispatcher.attach(consumer)


async def unsubscribe(
    worker: "Worker", connection: "Connection", request: wire.Unsubscribe, _: memoryview
) -> Reply:
    consumer = _consumer(connection, request.stream)
    consumer.forget()

    async def leave(number: int) -> None:
        with contextlib.suppress(NotOwner):  # else its session is the new owner's to end
            await worker.partition(consumer.topic, number).call(
                lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name),
                consumer.incarnation,
            )

    given_back = consumer.partitions
    if request.partitions is not None:
        given_back = given_back.intersection(request.partitions)
    left = await asyncio.gather(*(leave(number) for number in given_back), return_exceptions=True)
    for number in given_back:
        partition = worker.partitions.get((consumer.topic, number))
        if partition is not None and (dispatcher := partition.dispatchers.get(consumer.subscription)):
            dispatcher.feed()
    for failure in left:
        if isinstance(failure, BaseException):
            raise failure
    return DONE


# Settling


def _consumer(connection: "Connection", stream: int) -> Consumer:
    consumer = connection.streams.get(stream)
    if consumer is None:
        raise InvalidArgument(f"there is no consumer with stream {stream} on this connection")
    return consumer


async def settle(
    worker: "Worker", connection: "Connection", request: wire.Ack | wire.Nack | wire.Extend, body: memoryview
) -> Reply:
    consumer = _consumer(connection, request.stream)
    if request.partition not in consumer.partitions | consumer.left:
        raise InvalidArgument(f"stream {request.stream} has not subscribed to partition {request.partition}")
    partition = worker.partition(consumer.topic, request.partition)
    if request.partition in consumer.left:  # it has come back: the client is about to be let in again
        raise Unavailable(f"the consumer is not subscribed to partition {request.partition} here any more")
    receipts = receipts_of(wire.unpack(body, _RECEIPTS))
    name, whose = consumer.subscription, consumer.name
    dispatcher = partition.dispatchers.get(name)
    nacked = isinstance(request, wire.Nack)

    def make_room(done: Receipts, result: SettleResult) -> None:
        # Its connection may have ended meanwhile, and another have the name and what it holds.
        gone = result.returned if nacked else None
        _make_room(worker.consumers.get(consumer.identity, consumer), request.partition, done, result, gone)

    async def call(step: Callable[[Engine, Lease], Awaitable[SettleResult]]) -> SettleResult:
        try:
            return await partition.call(step, consumer.incarnation)
        except Unavailable:  # and yet it may have been done
            if dispatcher is not None:
                dispatcher.doubt([worker.consumers.get(consumer.identity, consumer)])
            raise

    if isinstance(request, wire.Extend):
        result = await call(
            lambda engine, lease: engine.extend(
                lease,
                name,
                receipts,
                lease_ms=request.lease_ms,
                until_ms=request.until_ms,
                at_ms=worker.now_ms(),
                consumer=whose,
            )
        )
        if dispatcher is not None:
            dispatcher.due(instant(result.deadline_ms, result.now_ms))
        return _settled(result), b""
    if isinstance(request, wire.Ack):
        names = _names(request.bodies)
        result = await call(
            lambda engine, lease: engine.ack(lease, name, receipts, names, consumer=whose, told=make_room)
        )
        for record, entries in result.records:
            gone = names_within(request.bodies or [], entries)
            worker.disposal.recorded(connection, (consumer.topic, request.partition), record, gone)
    else:
        result = await call(
            lambda engine, lease: engine.nack(
                lease,
                name,
                receipts,
                delay_ms=request.delay_ms,
                until_ms=request.until_ms,
                charged=request.charged,
                consumer=whose,
                told=make_room,
            )
        )
    if dispatcher is not None and (dispatcher.ordered or nacked):
        if nacked:
            # What was leased before goes out before: behind the answer it would pass for a new lease.
            await dispatcher.fetched()
        dispatcher.ask(consumer)  # what is left of its lanes can be served, now or later
        dispatcher.feed()
    return _settled(result), b""


def _names(bodies: list[int | str] | None) -> str | None:
    """Entry and name of each body, checked and as the scripts want them; None where nothing is said."""
    if not bodies:
        return None if bodies is None else ""
    entries, names = set(map(type, bodies[::2])), set(map(type, bodies[1::2]))
    if len(bodies) % 2 or entries != {int} or names != {str} or max(map(len, bodies[1::2])) > wire.MAX_UID:  # type: ignore[arg-type]
        raise InvalidArgument(f"bodies are entry, name, …, names of up to {wire.MAX_UID} bytes")
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


def _settled(result: SettleResult) -> wire.SettleReply:
    return wire.SettleReply(
        [number for stale in result.stale for number in stale],
        result.deadline_ms,
        [number for part in result.returned for number in part],
    )
