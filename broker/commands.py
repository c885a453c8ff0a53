"""What each request does: a table from a frame's type to a handler."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from broker import inspection
from broker.arguments import MAX_BATCH, MAX_MS, MAX_PERMITS, check_int, pack_flat_receipts
from broker.consumer import FRAME, Consumer
from broker.keys import check_name
from broker.partition import Partition
from broker.results import Backoff, Delivery, SettleResult, SubscriptionSettings, TopicSettings
from client import wire
from client.errors import (
    ConnectionClosed,
    IncompatibleVersion,
    InvalidArgument,
    ProtocolError,
    SubscriptionNotFound,
    TopicNotFound,
)
from client.wire import Type

if TYPE_CHECKING:
    from broker.connection import Connection
    from broker.worker import Worker

Reply = tuple[wire.Properties, bytes]
Handler = Callable[["Worker", "Connection", Any, memoryview], Awaitable[Reply]]

_RECEIPTS = Annotated[list[str | int], Meta(max_length=MAX_BATCH * 4)]  # bounded before memory is set aside
_PEEKS = 100  # messages, so that the answer fits into a frame
_DONE: Reply = (wire.Properties(), b"")


async def carry_out(worker: "Worker", connection: "Connection", frame: wire.Frame) -> Reply:
    """Find the handler of a frame and run it."""
    try:
        properties, handler = HANDLERS[frame.type]
    except KeyError:
        raise ProtocolError(f"frames of type {frame.type} are not known here") from None
    return await handler(worker, connection, wire.properties_of(frame, properties), frame.body)


# The connection


async def info(worker: "Worker", connection: "Connection", request: wire.Info, _: memoryview) -> Reply:
    oldest, newest = request.versions
    if newest < wire.OLDEST_VERSION or oldest > wire.VERSION or oldest > newest:
        asyncio.get_running_loop().call_soon(connection.close)  # once this has been said
        raise IncompatibleVersion(
            f"the client speaks versions {oldest} to {newest} of the protocol, the broker "
            f"{wire.OLDEST_VERSION} to {wire.VERSION}: update the older one"
        )
    connection.greeted = True
    settings = worker.settings
    return (
        wire.InfoReply(
            version=min(newest, wire.VERSION),
            worker=worker.id,
            release=worker.release,
            workers=[wire.WorkerAddress(worker.id, worker.address)],
            time_ms=worker.now_ms(),
            payloads=settings.payloads or worker.redis_url,
            payload_lifetime_ms=round(settings.payload_lifetime * 1_000),
            heartbeat_ms=round(settings.heartbeat * 1_000),
            session_ms=worker.session_ms,
            max_frame=int(settings.max_frame),
        ),
        b"",
    )


# Topics


async def create_topic(worker: "Worker", _: "Connection", request: wire.CreateTopic, __: memoryview) -> Reply:
    limit = worker.settings.max_partitions
    partitions = worker.settings.default_partitions if request.partitions is None else request.partitions
    check_int("partitions", partitions, 1, limit)
    settings = TopicSettings(partitions)
    if request.dedupe_ms is not None:
        settings = TopicSettings(partitions, dedupe_ms=request.dedupe_ms)
    made = await worker.engine.create_topic(request.topic, settings, exist_ok=request.exist_ok)
    return wire.TopicReply(made.partitions, made.dedupe_ms, made.retain), b""


async def delete_topic(worker: "Worker", _: "Connection", request: wire.DeleteTopic, __: memoryview) -> Reply:
    await worker.engine.delete_topic(request.topic)
    for partition in _partitions_of(worker, request.topic):
        partition.close(TopicNotFound(f"topic {request.topic!r} was deleted"))
    return _DONE


def _partitions_of(worker: "Worker", topic: str) -> list[Partition]:
    return [partition for partition in list(worker.partitions.values()) if partition.topic == topic]


async def topics(worker: "Worker", _: "Connection", __: wire.Topics, ___: memoryview) -> Reply:
    return wire.Properties(), wire.pack(await worker.engine.topics())


async def describe_topic(
    worker: "Worker", _: "Connection", request: wire.DescribeTopic, __: memoryview
) -> Reply:
    settings = await worker.engine.describe_topic(request.topic)
    reply = wire.TopicReply(settings.partitions, settings.dedupe_ms, settings.retain)
    if request.counts:
        counts = await inspection.count_topic(worker.engine.store, request.topic, settings.partitions)
        reply = wire.TopicReply(
            settings.partitions,
            settings.dedupe_ms,
            settings.retain,
            counts.subscriptions,
            counts.messages,
            counts.published,
        )
    return reply, b""


# Subscriptions


async def create_subscription(
    worker: "Worker", _: "Connection", request: wire.CreateSubscription, __: memoryview
) -> Reply:
    backoff = None if request.backoff is None else Backoff(*request.backoff)
    settings = SubscriptionSettings(request.mode, request.delivery, request.lease_ms, backoff)
    await _create(worker, request.topic, request.subscription, settings, request.start, request.exist_ok)
    return _DONE


async def _create(
    worker: "Worker", topic: str, name: str, settings: SubscriptionSettings, start: str, exist_ok: bool
) -> None:
    place, partition = parse_position(start)
    first = "latest" if partition is not None else place
    await worker.engine.create_subscription(topic, name, settings, start=first, exist_ok=exist_ok)
    if partition is not None:
        await worker.engine.seek(topic, name, place, partition)


def parse_position(text: str) -> tuple[str | int | datetime, int | None]:
    """A position as it is written on the wire, and the partition that it is about, if it is one."""
    if text in ("latest", "earliest"):
        return text, None
    kind, _, rest = text.partition(":")
    if kind == "time" and rest.isdecimal() and len(rest) < 14:
        return datetime.fromtimestamp(int(rest) / 1_000, UTC), None
    ledger, _, entry = rest.partition("-")
    if all(part.isdecimal() and len(part) < 15 for part in (kind, ledger, entry)):
        return int(entry), int(kind)
    raise InvalidArgument(
        f"position {text[:60]!r}: use 'earliest', 'latest', 'time:<ms>' or an id like '3:1-42'"
    )


async def delete_subscription(
    worker: "Worker", _: "Connection", request: wire.DeleteSubscription, __: memoryview
) -> Reply:
    await worker.engine.describe_subscription(request.topic, request.subscription)
    await worker.engine.delete_subscription(request.topic, request.subscription)
    deleted = SubscriptionNotFound(f"subscription {request.subscription!r} of {request.topic!r} was deleted")
    for partition in _partitions_of(worker, request.topic):
        if dispatcher := partition.dispatchers.get(request.subscription):
            dispatcher.end_all(deleted)
    return _DONE


def _feed(worker: "Worker", topic: str, subscription: str) -> None:
    """Let the dispatchers of a subscription look again."""
    for partition in _partitions_of(worker, topic):
        if subscription in partition.dispatchers:
            partition.dispatchers[subscription].feed()


async def describe_subscription(
    worker: "Worker", _: "Connection", request: wire.DescribeSubscription, __: memoryview
) -> Reply:
    engine = worker.engine
    partitions = (await engine.describe_topic(request.topic)).partitions
    settings = await engine.describe_subscription(request.topic, request.subscription)
    counts = await inspection.count_subscription(
        engine.store, request.topic, request.subscription, partitions, worker.now_ms()
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
    worker: "Worker", _: "Connection", request: wire.ChangeSubscription, __: memoryview
) -> Reply:
    await worker.engine.describe_subscription(request.topic, request.subscription)
    await worker.engine.pause_subscription(request.topic, request.subscription, request.paused)
    _feed(worker, request.topic, request.subscription)
    return _DONE


async def seek(worker: "Worker", _: "Connection", request: wire.Seek, __: memoryview) -> Reply:
    place, partition = parse_position(request.position)
    await worker.engine.describe_subscription(request.topic, request.subscription)
    await worker.engine.seek(request.topic, request.subscription, place, partition)
    _feed(worker, request.topic, request.subscription)
    return _DONE


async def peek(worker: "Worker", _: "Connection", request: wire.Peek, __: memoryview) -> Reply:
    engine = worker.engine
    count = (await engine.describe_topic(request.topic)).partitions
    await engine.describe_subscription(request.topic, request.subscription)
    numbers: range | list[int] = range(count)
    if request.partition is not None:
        numbers = [check_int("partition", request.partition, 0, count - 1)]
    check_int("limit", request.limit, 1, _PEEKS)
    found = await inspection.peek(engine.store, request.topic, request.subscription, numbers, request.limit)
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
    return wire.Properties(), wire.pack(answers)


# Consumers


async def subscribe(
    worker: "Worker", connection: "Connection", request: wire.Subscribe, _: memoryview
) -> Reply:
    check_name("consumer", request.consumer)
    check_int("permits", request.permits, 1, MAX_PERMITS)
    if request.stream in connection.streams or request.stream in connection.opening:
        raise InvalidArgument(f"stream {request.stream} is in use on this connection")
    connection.opening.add(request.stream)
    try:
        return await _open(worker, connection, request)
    finally:
        connection.opening.discard(request.stream)


async def _open(worker: "Worker", connection: "Connection", request: wire.Subscribe) -> Reply:
    count = (await worker.engine.describe_topic(request.topic)).partitions
    numbers = list(range(count)) if request.partitions is None else sorted(set(request.partitions))
    if not numbers:
        raise InvalidArgument("a consumer needs at least one partition")
    for number in (numbers[0], numbers[-1]):
        check_int("partition", number, 0, count - 1)
    settings = await _settings_of(worker, request)
    lease_ms = settings.lease_ms if request.lease_ms is None else request.lease_ms
    check_int("lease_ms", lease_ms, 1, MAX_MS)

    if not connection.alive:
        raise ConnectionClosed("the connection ended before the consumer was open")
    consumer = Consumer(connection, request, lease_ms, numbers)
    before = worker.consumers.get(consumer.identity)
    if before is not None:
        before.end("subscription_busy", f"another connection took over as consumer {consumer.name!r}")
    worker.consumers[consumer.identity] = connection.streams[consumer.stream] = consumer
    try:
        held = await _join(worker, consumer, settings)
    except BaseException:
        consumer.forget()
        raise
    # Once this has been answered: what the client asks then is younger than what is held.
    asyncio.get_running_loop().call_soon(_begin, worker, consumer, settings, held)
    messages = sum(len(delivery.messages) for deliveries in held.values() for delivery in deliveries)
    return wire.SubscribeReply(settings.mode, settings.delivery, lease_ms, count, messages), b""


async def _settings_of(worker: "Worker", request: wire.Subscribe) -> SubscriptionSettings:
    """The settings of the subscription, made if it is not there."""
    engine = worker.engine
    try:
        found = await engine.describe_subscription(request.topic, request.subscription)
        if request.mode is None or found.mode == request.mode:
            return found
    except SubscriptionNotFound:
        pass
    made = SubscriptionSettings(request.mode or "shared")
    if request.lease_ms is not None:
        made = SubscriptionSettings(made.mode, lease_ms=request.lease_ms)
    # Of another mode, this names the one that it has.
    await _create(worker, request.topic, request.subscription, made, request.start, exist_ok=True)
    return await engine.describe_subscription(request.topic, request.subscription)


async def _join(
    worker: "Worker", consumer: Consumer, settings: SubscriptionSettings
) -> dict[int, list[Delivery]]:
    """Open the consumer's session on each partition; answers what its name holds there.

    The first partition decides who is alone on an exclusive subscription.
    """

    async def join(number: int) -> list[Delivery]:
        partition = worker.partition(consumer.topic, number)
        was_open = await partition.call(
            lambda engine, lease: engine.join(lease, consumer.subscription, consumer.name, worker.session_ms)
        )
        if not was_open:
            return []
        held = await partition.call(
            lambda engine, lease: engine.held(lease, consumer.subscription, consumer.name)
        )
        if held and settings.delivery == "at_most_once":
            # Leased and never sent, or it would be settled: to be fetched once more.
            await partition.call(
                lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name)
            )
            return await join(number)
        return held

    began = worker.now_ms()
    first, *others = consumer.partitions
    held = [await join(first), *await asyncio.gather(*(join(number) for number in others))]
    if worker.now_ms() - began > worker.session_ms / 3:  # nobody has renewed what was joined first
        for number in consumer.partitions:
            await worker.partition(consumer.topic, number).call(
                lambda engine, lease: engine.touch(
                    lease, consumer.subscription, [consumer.name], worker.session_ms
                )
            )
    return dict(zip(consumer.partitions, held, strict=True))


def _begin(
    worker: "Worker", consumer: Consumer, settings: SubscriptionSettings, held: dict[int, list[Delivery]]
) -> None:
    """Hand a consumer what its name still holds, and then serve it."""
    if not consumer.connection.alive:
        consumer.forget()
    for number in consumer.partitions:
        if worker.consumers.get(consumer.identity) is not consumer:
            return  # it has ended, or another has taken over
        partition = worker.partition(consumer.topic, number)
        dispatcher = partition.dispatcher(consumer.subscription, settings.mode, settings.delivery)
        dispatcher.hand_back(consumer, held[number])
        dispatcher.attach(consumer)


async def unsubscribe(
    worker: "Worker", connection: "Connection", request: wire.Unsubscribe, _: memoryview
) -> Reply:
    consumer = _consumer(connection, request.stream)
    consumer.forget()

    async def leave(number: int) -> None:
        await worker.partition(consumer.topic, number).call(
            lambda engine, lease: engine.leave(lease, consumer.subscription, consumer.name)
        )

    left = await asyncio.gather(*(leave(number) for number in consumer.partitions), return_exceptions=True)
    _feed(worker, consumer.topic, consumer.subscription)
    for failure in left:
        if isinstance(failure, BaseException):
            raise failure
    return _DONE


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
    if request.partition not in consumer.partitions:
        raise InvalidArgument(f"the consumer has no partition {request.partition}")
    partition = worker.partition(consumer.topic, request.partition)
    receipts: list[str | int] = wire.unpack(body, _RECEIPTS)
    packed = pack_flat_receipts(receipts)
    name = consumer.subscription
    dispatcher = partition.dispatchers.get(name)
    if isinstance(request, wire.Ack):
        result = await partition.call(lambda engine, lease: engine.ack(lease, name, packed))
    elif isinstance(request, wire.Nack):
        result = await partition.call(
            lambda engine, lease: engine.nack(
                lease,
                name,
                packed,
                delay_ms=request.delay_ms,
                until_ms=request.until_ms,
                charged=request.charged,
            )
        )
        if dispatcher is not None:
            # What was leased before goes out before: behind the answer it would pass for a new lease.
            await dispatcher.fetched()
    else:
        result = await partition.call(
            lambda engine, lease: engine.extend(
                lease, name, packed, lease_ms=request.lease_ms, until_ms=request.until_ms
            )
        )
        if dispatcher is not None:
            dispatcher.due(result.deadline_ms)
        return _settled(result), b""
    if dispatcher is not None and (dispatcher.ordered or not isinstance(request, wire.Ack)):
        dispatcher.feed()
    consumer.give(sum(receipts[3::4]) - sum(receipts[2::4]) + len(receipts) // 4)  # type: ignore[arg-type]
    return _settled(result), b""


def _settled(result: SettleResult) -> wire.SettleReply:
    return wire.SettleReply(
        [number for stale in result.stale for number in stale],
        [number for bounds in result.forgotten for number in bounds],
        result.deadline_ms,
    )


# Those that may read and answer a lot.
HEAVY = {Type.PEEK, Type.TOPICS, Type.DESCRIBE_TOPIC, Type.DESCRIBE_SUBSCRIPTION}

HANDLERS: dict[int, tuple[type[wire.Properties], Handler]] = {
    Type.INFO: (wire.Info, info),
    Type.CREATE_TOPIC: (wire.CreateTopic, create_topic),
    Type.DELETE_TOPIC: (wire.DeleteTopic, delete_topic),
    Type.TOPICS: (wire.Topics, topics),
    Type.DESCRIBE_TOPIC: (wire.DescribeTopic, describe_topic),
    Type.CREATE_SUBSCRIPTION: (wire.CreateSubscription, create_subscription),
    Type.DELETE_SUBSCRIPTION: (wire.DeleteSubscription, delete_subscription),
    Type.DESCRIBE_SUBSCRIPTION: (wire.DescribeSubscription, describe_subscription),
    Type.CHANGE_SUBSCRIPTION: (wire.ChangeSubscription, change_subscription),
    Type.SEEK: (wire.Seek, seek),
    Type.PEEK: (wire.Peek, peek),
    Type.SUBSCRIBE: (wire.Subscribe, subscribe),
    Type.UNSUBSCRIBE: (wire.Unsubscribe, unsubscribe),
    Type.ACK: (wire.Ack, settle),
    Type.NACK: (wire.Nack, settle),
    Type.EXTEND: (wire.Extend, settle),
}
