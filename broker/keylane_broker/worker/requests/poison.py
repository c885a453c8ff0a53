"""What is asked about messages that have failed too often."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import BrokerError, InvalidArgument
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply
from keylane_broker.worker.requests.subscriptions import one_place

_ENTRIES = Annotated[list[Annotated[int, Meta(ge=1, le=10**14)]], Meta(max_length=wire.MAX_BATCH)]
_ACTIONS = ("resume", "skip")


async def withdraw(
    context: Context, connection: Connection, request: wire.Withdraw, body: memoryview
) -> Reply:
    engine = context.engine
    about = await engine.describe_topic(request.topic)
    engine.check_partition(request.topic, request.partition, about.partitions)
    entries = wire.unpack(body, _ENTRIES)
    taken = await engine.withdraw(
        request.topic,
        request.partition,
        entries,
        purge=request.purge,
        # Anybody who may publish there can say of a message that it is a dead letter of another topic.
        check_source=partial(connection.identity.require, "produce"),
    )
    for subscription in await engine.subscriptions(request.topic) if taken else ():
        await context.partitions.subscription_changed(request.topic, subscription)  # a lane may have waited
    if not request.purge:
        with suppress(BrokerError):  # then it is tried again, in the background
            await context.outboxes.empty(request.topic, request.partition)
    return wire.WithdrawReply(len(taken)), b""


async def parked(context: Context, _: Connection, request: wire.Parked, __: memoryview) -> Reply:
    engine = context.engine
    about = await engine.describe_topic(request.topic)
    await one_place(context, request.topic, request.subscription, "park")
    lanes = await engine.parked(request.topic, request.subscription, about.partitions)
    return wire.Properties(), wire.pack(
        [
            wire.ParkedLane(
                lane.key,
                f"{lane.partition}:{lane.id}",
                lane.since_ms,
                lane.retries,
                lane.consumer,
                lane.reason,
                lane.waiting,
            )
            for lane in lanes
        ]
    )


async def unpark(context: Context, _: Connection, request: wire.Unpark, __: memoryview) -> Reply:
    if request.action not in _ACTIONS:
        raise InvalidArgument(f"action {request.action[:60]!r}: use one of {', '.join(_ACTIONS)}")
    engine, topic, name = context.engine, request.topic, request.subscription
    about = await engine.describe_topic(topic)
    await one_place(context, topic, name, "park")
    unparked = [
        lane.partition
        for lane in await engine.parked(topic, name, about.partitions)
        if lane.key == request.key
        and request.id in ("", f"{lane.partition}:{lane.id}")
        and await engine.unpark(topic, name, lane, request.action)
    ]
    if unparked:
        await context.partitions.subscription_changed(topic, name)
    if request.action == "skip":
        await asyncio.gather(*(context.outboxes.sent(topic, partition) for partition in set(unparked)))
    return wire.UnparkReply(len(unparked)), b""
