"""What is asked of subscriptions."""

import msgspec

from keylane import wire
from keylane.errors import InvalidArgument, SubscriptionExists, SubscriptionNotFound
from keylane.wire.about import without_inline
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Backoff, SubscriptionSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.inspect.peek import Unsettled
from keylane_broker.inspect.peek import peek as peek_messages
from keylane_broker.store.keys import PLACE
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import FRAME
from keylane_broker.worker.context import Context
from keylane_broker.worker.differences import differences
from keylane_broker.worker.positions import create_subscription_at, position_in
from keylane_broker.worker.request_turns import DONE, Reply

_PEEKS = 100  # messages, so that the answer fits into a frame


async def create_subscription(
    context: Context, connection: Connection, request: wire.CreateSubscription, _: memoryview
) -> Reply:
    connection.identity.require_dead_letter(request.topic, request.dead_letter)
    settings = SubscriptionSettings(
        request.mode,
        request.delivery,
        request.lease_ms,
        _backoff(request.backoff),
        request.max_retries,
        request.dead_letter,
        request.poison,
        Filter(request.keys, request.filter),
    )
    await create_subscription_at(
        context.engine,
        request.topic,
        request.subscription,
        settings,
        request.start,
        exist_ok=request.exist_ok,
    )
    if request.exist_ok:
        await _check_same(context, request, settings)
    return DONE


async def _check_same(
    context: Context, request: wire.CreateSubscription, settings: SubscriptionSettings
) -> None:
    """Raise if the subscription that is there is another one than was asked for; defaults ask for nothing."""
    found = await context.engine.describe_subscription(request.topic, request.subscription)
    asked, there = msgspec.structs.asdict(settings), msgspec.structs.asdict(found)
    usual = SubscriptionSettings(backoff=_backoff(wire.BACKOFF))
    given = {name: value for name, value in asked.items() if value != getattr(usual, name)}
    there["dead_letter"] = found.dead_letter or f"{request.topic}.dead"
    if other := differences(given, there):
        raise SubscriptionExists(
            f"subscription {request.subscription!r} of {request.topic!r} exists with {other}: omit "
            "that, change it (not delivery, keys or filter), or use another subscription"
        )


def _backoff(said: tuple[float, float, float, float] | None) -> Backoff | None:
    return None if said is None else Backoff(*said)


async def delete_subscription(
    context: Context, _: Connection, request: wire.DeleteSubscription, __: memoryview
) -> Reply:
    await context.engine.delete_subscription(request.topic, request.subscription)
    deleted = SubscriptionNotFound(f"subscription {request.subscription!r} of {request.topic!r} was deleted")
    for partition in context.partitions.of_topic(request.topic):
        for name, dispatcher in list(partition.dispatchers.items()):
            if name.partition(PLACE)[0] == request.subscription:
                dispatcher.end_consumers(deleted)
    await context.partitions.subscription_changed(request.topic, request.subscription)
    return DONE


async def describe_subscription(
    context: Context, _: Connection, request: wire.DescribeSubscription, __: memoryview
) -> Reply:
    engine = context.engine
    partitions = (await engine.describe_topic(request.topic)).partitions
    settings = await engine.describe_subscription(request.topic, request.subscription)
    counts = await inspection.count_subscription(
        engine.store,
        request.topic,
        request.subscription,
        partitions,
        context.clock.now_ms(),
        multicast=settings.mode == "multicast",
    )
    backoff = settings.backoff
    return (
        wire.SubscriptionReply(
            mode=settings.mode,
            delivery=settings.delivery,
            lease_ms=settings.lease_ms,
            backoff=None if backoff is None else msgspec.structs.astuple(backoff),
            paused=counts.paused,
            backlog=counts.fresh + counts.leased + counts.waiting,
            fresh=counts.fresh,
            leased=counts.leased,
            waiting=counts.waiting,
            consumers=sorted(counts.consumers),
            keys=settings.filter.keys,
            filter=settings.filter.filter,
            max_retries=settings.max_retries,
            dead_letter=settings.dead_letter or f"{request.topic}.dead",
            poison=settings.poison,
        ),
        b"",
    )


async def change_subscription(
    context: Context, connection: Connection, request: wire.ChangeSubscription, _: memoryview
) -> Reply:
    connection.identity.require_dead_letter(request.topic, request.dead_letter)
    await one_place(context, request.topic, request.subscription, "change")
    values = {
        "lease_ms": request.lease_ms,
        "backoff": _backoff(request.backoff),
        "max_retries": request.max_retries,
        "dead_letter": request.dead_letter,
        "poison": request.poison,
    }
    if unknown := set(request.changes) - values.keys():
        raise InvalidArgument(f"{min(unknown)[:60]!r} cannot be changed: use {', '.join(values)}")
    if request.changes:
        changes = {name: values[name] for name in request.changes}
        await context.engine.change_subscription(request.topic, request.subscription, changes)
    if request.paused is not None:
        await context.engine.pause_subscription(request.topic, request.subscription, request.paused)
    await context.partitions.subscription_changed(request.topic, request.subscription)
    return DONE


async def seek(context: Context, _: Connection, request: wire.Seek, __: memoryview) -> Reply:
    position, partition = await position_in(context.engine, request.topic, request.position)
    await one_place(context, request.topic, request.subscription, "move")
    await context.engine.seek(request.topic, request.subscription, position, partition)
    await context.partitions.subscription_sought(request.topic, request.subscription)
    return DONE


async def peek(context: Context, connection: Connection, request: wire.Peek, _: memoryview) -> Reply:
    engine = context.engine
    count = (await engine.describe_topic(request.topic)).partitions
    await one_place(context, request.topic, request.subscription, "look into")
    numbers: range | list[int] = range(count)
    if request.partition is not None:
        numbers = [check_int("partition", request.partition, 0, count - 1)]
    check_int("limit", request.limit, 1, _PEEKS)
    found = await peek_messages(engine.store, request.topic, request.subscription, numbers, request.limit)
    may_consume = connection.identity.may("consume", request.topic)
    return wire.Properties(), wire.pack(_first_that_fit(found, may_consume))


async def one_place(context: Context, topic: str, subscription: str, verb: str) -> None:
    """Raise unless the subscription is there, and is not many."""
    if (await context.engine.describe_subscription(topic, subscription)).mode == "multicast":
        raise InvalidArgument(
            f"subscription {subscription!r} of {topic!r} is multicast: each consumer has a place of its own, "
            f"from when it registered on, so there is none to {verb}"
        )


def _first_that_fit(found: list[Unsettled], may_consume: bool) -> list[wire.PeekedMessage]:
    """Return as many as one frame should hold; who may not consume gets no bodies that are inline."""
    answers: list[wire.PeekedMessage] = []
    size = 0
    for item in found:
        id, key, uid, about, retries = msgspec.structs.astuple(item.message)
        if not may_consume:
            about = without_inline(about)
        size += len(key) + len(uid) + len(about)
        if size > FRAME and answers:
            break
        answers.append(
            wire.PeekedMessage(
                f"{item.partition}:{id}", key, uid, about, item.state, item.consumer, retries, item.due_ms
            )
        )
    return answers


async def move_key(context: Context, _: Connection, request: wire.MoveKey, __: memoryview) -> Reply:
    engine, topic, name = context.engine, request.topic, request.subscription
    about = await engine.describe_topic(topic)
    await engine.describe_subscription(topic, name)  # or a near name
    if not request.key or "\0" in request.key:
        raise InvalidArgument(f"key is {request.key!r:.60}: use that of the messages")
    partition = request.partition
    if partition is None:
        partition = wire.partition_of(request.key, about.partitions)
    engine.check_partition(topic, partition, about.partitions)
    waiting = await engine.move_key(topic, name, partition, request.key, request.consumer)
    await context.partitions.subscription_changed(topic, name)
    return wire.MoveKeyReply(waiting), b""
