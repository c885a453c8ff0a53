"""Opens and closes consumers: their sessions on each partition, and what their names hold already."""

import asyncio
import contextlib
from time import monotonic

import msgspec

from keylane import wire
from keylane.errors import (
    ConnectionClosed,
    InvalidArgument,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicReplaced,
    Unavailable,
)
from keylane_broker.engine.answers import by_position, check_incarnation, made_anew
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.consumers import place_name
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.subscriptions import check_same
from keylane_broker.engine.values import Backoff, Delivery, SubscriptionSettings
from keylane_broker.errors import NotOwner
from keylane_broker.limits import MAX_MS, MAX_PERMITS
from keylane_broker.store.keys import PLACE, check_name
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.held_messages import count_messages, without
from keylane_broker.worker.partition import Partition
from keylane_broker.worker.positions import create_subscription_at


async def subscribe(context: Context, connection: Connection, request: wire.Subscribe) -> wire.SubscribeReply:
    """Open a consumer, or more partitions for one that is open."""
    check_name("consumer", request.consumer)
    check_int("permits", request.permits, 0, MAX_PERMITS)
    open_there = connection.streams.get(request.stream)
    names = (request.subscription, place_name(request.subscription, request.consumer))
    other = open_there is not None and open_there.identity not in [
        (request.topic, name, request.consumer) for name in names
    ]
    if other or request.stream in connection.opening:
        raise InvalidArgument(f"stream {request.stream} is in use on this connection")
    connection.opening.add(request.stream)
    try:
        return await _open(context, connection, request)
    finally:
        connection.opening.discard(request.stream)


async def _open(context: Context, connection: Connection, request: wire.Subscribe) -> wire.SubscribeReply:
    engine, partitions = context.engine, context.partitions
    about = await engine.describe_topic(request.topic)
    check_incarnation(request.topic, request.incarnation, about.incarnation)
    count = about.partitions
    numbers = _numbers_of(request, count)
    settings = await _settings_of(context, request)
    try:
        for number in numbers:
            partitions.get(request.topic, number)
    except NotOwner:  # the worker before may have sent it here, and we have not heard yet
        await context.membership.refresh()
    for number in numbers:
        await partitions.get(request.topic, number).lease_of(about.incarnation)  # or another worker has it
    lease_ms = settings.lease_ms if request.lease_ms is None else request.lease_ms
    check_int("lease_ms", lease_ms, 1, MAX_MS)

    if not connection.alive:
        raise ConnectionClosed("the connection ended before the consumer was open")
    consumer = connection.streams.get(request.stream)
    if consumer is None:
        meant = request
        if settings.mode == "multicast":
            meant = msgspec.structs.replace(
                request, subscription=place_name(request.subscription, request.consumer)
            )
        consumer = partitions.consumers.open(connection, meant, lease_ms, about.incarnation)
        consumer.at_most_once = settings.delivery == "at_most_once"
    check_incarnation(request.topic, consumer.incarnation, about.incarnation)
    settings, held = await _join_all(context, consumer, request, settings, numbers)
    counts = {number: count_messages(deliveries) for number, deliveries in held.items()}
    for number, messages in counts.items():
        consumer.count(number, messages)
    # Once this has been answered: what the client asks then is younger than what is held.
    asyncio.get_running_loop().call_soon(_begin, context, consumer, settings, held)
    found = {number: partitions.by_place.get((request.topic, number)) for number in numbers}
    epochs = {number: partition.epoch for number, partition in found.items() if partition}
    return wire.SubscribeReply(
        settings.mode,
        settings.delivery,
        lease_ms,
        count,
        sum(counts.values()),
        epochs,
        settings.incarnation,
    )


def _numbers_of(request: wire.Subscribe, count: int) -> list[int]:
    """Return the partitions that are asked for, checked."""
    numbers = list(range(count)) if request.partitions is None else sorted(set(request.partitions))
    if not numbers:
        raise InvalidArgument("a consumer needs at least one partition")
    for number in (numbers[0], numbers[-1]):
        check_int("partition", number, 0, count - 1)
    return numbers


async def _settings_of(context: Context, request: wire.Subscribe) -> SubscriptionSettings:
    """Return the settings of the subscription, made if it is not there, unless it was there before."""
    engine, known = context.engine, request.subscription_incarnation
    if request.mode == "cursor":
        raise InvalidArgument(by_position(request.topic, request.subscription))
    try:
        found = await engine.describe_subscription(request.topic, request.subscription)
        if known not in (0, found.incarnation):
            raise SubscriptionNotFound(made_anew(request.topic, request.subscription))
        if found.mode == "cursor":
            raise InvalidArgument(by_position(request.topic, request.subscription))
        asked = msgspec.structs.replace(found, mode=request.mode or found.mode)
        if request.keys is not None or request.filter is not None:
            asked = msgspec.structs.replace(asked, filter=Filter(request.keys, request.filter))
        check_same(request.topic, request.subscription, found, asked)
        return found
    except SubscriptionNotFound:
        if known:
            raise
    made = SubscriptionSettings(
        request.mode or "shared",
        backoff=Backoff(*wire.BACKOFF),
        filter=Filter(request.keys, request.filter),
    )
    if request.lease_ms is not None:
        made = msgspec.structs.replace(made, lease_ms=request.lease_ms)
    await create_subscription_at(
        engine, request.topic, request.subscription, made, request.start, exist_ok=True
    )
    return await engine.describe_subscription(request.topic, request.subscription)


async def _join_all(
    context: Context,
    consumer: Consumer,
    request: wire.Subscribe,
    settings: SubscriptionSettings,
    numbers: list[int],
) -> tuple[SubscriptionSettings, dict[int, list[Delivery]]]:
    """Open the consumer's partitions; return what its name holds there and has not lost meanwhile."""
    for number in numbers:
        consumer.reopen(number)  # if it is open
    consumer.partitions.update(numbers)
    consumer.left.difference_update(numbers)
    consumer.listing.update({number: [] for number in numbers})
    try:
        try:
            held = await _join(context, consumer, settings, numbers)
        except SubscriptionNotFound:  # it was deleted since, or a partition has lost it
            if not await context.engine.mend_subscription(request.topic, request.subscription):
                raise
            settings = await _settings_of(context, request)
            held = await _join(context, consumer, settings, numbers)
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
    return settings, held


async def _join(
    context: Context, consumer: Consumer, settings: SubscriptionSettings, numbers: list[int]
) -> dict[int, list[Delivery]]:
    """Open the consumer's session on each partition; return what its name holds there.

    The first partition decides who is alone on an exclusive subscription.
    """

    opened: list[int] = []
    partitions, session_ms = context.partitions, context.session_ms

    async def join(number: int) -> list[Delivery]:
        partition = partitions.get(consumer.topic, number)
        if settings.mode == "multicast":
            was_open = await _register(partition, consumer, settings, session_ms)
        else:
            await partition.prolong_sessions(consumer.subscription)
            was_open = await partition.call(
                lambda engine, lease: engine.join(lease, consumer.subscription, consumer.name, session_ms),
                consumer.incarnation,
            )
        dispatcher = partition.dispatcher(consumer.subscription, settings.delivers_as, settings.delivery)
        if not dispatcher.consumers:
            dispatcher.wake()  # it ends the session, should the consumer go before it is served
        if not was_open:
            opened.append(number)
            return []
        held = await partition.held_by(consumer.subscription, consumer.name, consumer.incarnation)
        if held and settings.delivery == "at_most_once":
            # Leased and never sent, or it would be settled: to be fetched once more.
            await _leave(context, consumer, number)
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
                await _leave(context, consumer, number)
        if isinstance(failure, BaseException):
            raise failure
    if monotonic() - began > session_ms / 3_000:  # nobody has renewed what was joined first
        for number in numbers:
            await partitions.get(consumer.topic, number).call(
                lambda engine, lease: engine.renew_sessions(
                    lease, consumer.subscription, [consumer.name], session_ms
                ),
                consumer.incarnation,
            )
    return dict(zip(numbers, held, strict=True))


async def _register(
    partition: Partition, consumer: Consumer, settings: SubscriptionSettings, session_ms: int
) -> bool:
    """Open the session of a multicast consumer, with its place."""
    with contextlib.suppress(SubscriptionNotFound):  # there is no place to come back to
        await partition.prolong_sessions(consumer.subscription)
    subscription = consumer.subscription.partition(PLACE)[0]
    return await partition.call(
        lambda engine, lease: engine.register(lease, subscription, consumer.name, settings, session_ms),
        consumer.incarnation,
    )


async def _leave(context: Context, consumer: Consumer, number: int) -> None:
    """End the consumer's session on a partition; what it holds there goes to others."""
    await context.partitions.get(consumer.topic, number).call(
        lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name),
        consumer.incarnation,
    )


def _begin(
    context: Context, consumer: Consumer, settings: SubscriptionSettings, held: dict[int, list[Delivery]]
) -> None:
    """Hand a consumer what its name still holds, and then serve it."""
    if not consumer.connection.alive:
        consumer.forget()
    for number in held:
        if context.partitions.consumers.get(*consumer.identity) is not consumer:
            return  # it has ended, or another has taken over
        try:
            partition = context.partitions.get(consumer.topic, number)
        except NotOwner as gone:
            consumer.redirect(number, gone.address)
            continue
        except Unavailable:
            return  # the worker is stopping
        if partition.incarnation != consumer.incarnation:
            consumer.end(TopicReplaced.code, f"topic {consumer.topic!r} was made anew")
            return
        dispatcher = partition.dispatcher(consumer.subscription, settings.delivers_as, settings.delivery)
        dispatcher.recovery.send_held(consumer, held[number])
        dispatcher.attach(consumer)


async def unsubscribe(context: Context, consumer: Consumer, partitions: list[int] | None) -> None:
    """Close a consumer; what it holds of these partitions, or of all, goes to others."""
    consumer.forget()

    async def leave(number: int) -> None:
        with contextlib.suppress(NotOwner):  # else its session is the new owner's to end
            await _leave(context, consumer, number)

    given_back = consumer.partitions if partitions is None else consumer.partitions.intersection(partitions)
    left = await asyncio.gather(*(leave(number) for number in given_back), return_exceptions=True)
    for number in given_back:
        partition = context.partitions.by_place.get((consumer.topic, number))
        if partition is not None and (dispatcher := partition.dispatchers.get(consumer.subscription)):
            dispatcher.notify()
    for failure in left:
        if isinstance(failure, BaseException):
            raise failure
