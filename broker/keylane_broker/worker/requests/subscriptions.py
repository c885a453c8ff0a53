"""What is asked of subscriptions."""

import msgspec

from keylane import wire
from keylane.errors import SubscriptionNotFound
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Backoff, SubscriptionSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.inspect.peek import Unsettled
from keylane_broker.inspect.peek import peek as peek_messages
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import FRAME
from keylane_broker.worker.context import Context
from keylane_broker.worker.positions import create_subscription_at, position_in
from keylane_broker.worker.request_turns import DONE, Reply

_PEEKS = 100  # messages, so that the answer fits into a frame


async def create_subscription(
    context: Context, _: Connection, request: wire.CreateSubscription, __: memoryview
) -> Reply:
    backoff = None if request.backoff is None else Backoff(*request.backoff)
    settings = SubscriptionSettings(request.mode, request.delivery, request.lease_ms, backoff)
    await create_subscription_at(
        context.engine,
        request.topic,
        request.subscription,
        settings,
        request.start,
        exist_ok=request.exist_ok,
    )
    return DONE


async def delete_subscription(
    context: Context, _: Connection, request: wire.DeleteSubscription, __: memoryview
) -> Reply:
    await context.engine.delete_subscription(request.topic, request.subscription)
    deleted = SubscriptionNotFound(f"subscription {request.subscription!r} of {request.topic!r} was deleted")
    for partition in context.partitions.of_topic(request.topic):
        if dispatcher := partition.dispatchers.get(request.subscription):
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
        engine.store, request.topic, request.subscription, partitions, context.clock.now_ms()
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
        ),
        b"",
    )


async def change_subscription(
    context: Context, _: Connection, request: wire.ChangeSubscription, __: memoryview
) -> Reply:
    await context.engine.describe_subscription(request.topic, request.subscription)
    await context.engine.pause_subscription(request.topic, request.subscription, request.paused)
    await context.partitions.subscription_changed(request.topic, request.subscription)
    return DONE


async def seek(context: Context, _: Connection, request: wire.Seek, __: memoryview) -> Reply:
    position, partition = await position_in(context.engine, request.topic, request.position)
    await context.engine.describe_subscription(request.topic, request.subscription)
    await context.engine.seek(request.topic, request.subscription, position, partition)
    await context.partitions.subscription_changed(request.topic, request.subscription)
    return DONE


async def peek(context: Context, _: Connection, request: wire.Peek, __: memoryview) -> Reply:
    engine = context.engine
    count = (await engine.describe_topic(request.topic)).partitions
    await engine.describe_subscription(request.topic, request.subscription)
    numbers: range | list[int] = range(count)
    if request.partition is not None:
        numbers = [check_int("partition", request.partition, 0, count - 1)]
    check_int("limit", request.limit, 1, _PEEKS)
    found = await peek_messages(engine.store, request.topic, request.subscription, numbers, request.limit)
    return wire.Properties(), wire.pack(_first_that_fit(found))


def _first_that_fit(found: list[Unsettled]) -> list[wire.PeekedMessage]:
    """Return as many as one frame should hold."""
    answers: list[wire.PeekedMessage] = []
    size = 0
    for item in found:
        id, key, uid, about, retries = msgspec.structs.astuple(item.message)
        size += len(key) + len(uid) + len(about)
        if size > FRAME and answers:
            break
        answers.append(
            wire.PeekedMessage(
                f"{item.partition}:{id}", key, uid, about, item.state, item.consumer, retries, item.due_ms
            )
        )
    return answers
