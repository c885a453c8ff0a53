"""What is asked of the connection, of topics and of subscriptions."""

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from keylane import wire
from keylane.errors import IncompatibleVersion, InvalidArgument, SubscriptionNotFound, TopicNotFound
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Backoff, SubscriptionSettings, TopicSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.worker.consumer import FRAME
from keylane_broker.worker.partition import Partition

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker

Reply = tuple[wire.Properties, bytes]

DONE: Reply = (wire.Properties(), b"")
_PEEKS = 100  # messages, so that the answer fits into a frame
_CLIENT = 100  # characters of who a client says it is, in the log


# The connection


async def info(worker: "Worker", connection: "Connection", request: wire.Info, _: memoryview) -> Reply:
    oldest, newest = request.versions
    if newest < wire.OLDEST_VERSION or oldest > wire.VERSION or oldest > newest:
        asyncio.get_running_loop().call_soon(connection.close)  # once this has been said
        raise IncompatibleVersion(
            f"the client speaks versions {oldest} to {newest} of the protocol, the broker "
            f"{wire.OLDEST_VERSION} to {wire.VERSION}: update the older one"
        )
    if request.client and not connection.greeted:
        connection.peer += f" {request.client[:_CLIENT]!r}"
    connection.greeted = True
    if request.store and request.store != connection.store:
        connection.store = request.store
        worker.disposal.joined()
    settings, member = worker.settings, worker.member
    incarnation, owners = 0, list[str]()
    if request.topic:
        incarnation, owners = await member.placement(request.topic)
        connection.topics.add(request.topic)
    workers = [report for report in member.workers.values() if report.address]
    places = {report.id: place for place, report in enumerate(workers)}
    return (
        wire.InfoReply(
            version=min(newest, wire.VERSION),
            worker=worker.id,
            release=worker.release,
            workers=[wire.WorkerAddress(report.id, report.address) for report in workers],
            time_ms=worker.now_ms(),
            payloads=worker.payloads,
            payload_lifetime_ms=round(settings.payload_lifetime * 1_000),
            heartbeat_ms=round(settings.heartbeat * 1_000),
            session_ms=worker.session_ms,
            max_frame=int(settings.max_frame),
            owners=[places.get(owner, -1) for owner in owners],
            payloads_beside=worker.payloads_beside,
            incarnation=incarnation,
        ),
        b"",
    )


# Topics


async def create_topic(worker: "Worker", _: "Connection", request: wire.CreateTopic, __: memoryview) -> Reply:
    limit = worker.settings.max_partitions
    partitions = worker.settings.default_partitions if request.partitions is None else request.partitions
    check_int("partitions", partitions, 1, limit)
    settings = TopicSettings(partitions, journal=request.journal or 0)
    if request.dedupe_ms is not None:
        settings = TopicSettings(partitions, dedupe_ms=request.dedupe_ms, journal=request.journal or 0)
    made = await worker.engine.create_topic(request.topic, settings, exist_ok=request.exist_ok)
    await worker.member.topics_changed()
    return _described(made), b""


async def change_topic(worker: "Worker", _: "Connection", request: wire.ChangeTopic, __: memoryview) -> Reply:
    return _described(await worker.engine.change_topic(request.topic, journal=request.journal)), b""


def _described(settings: TopicSettings, counts: inspection.TopicCounts | None = None) -> wire.TopicReply:
    counts = counts or inspection.TopicCounts()
    return wire.TopicReply(
        settings.partitions,
        settings.dedupe_ms,
        settings.retain,
        counts.subscriptions,
        counts.messages,
        counts.published,
        settings.journal,
        counts.delayed,
        settings.incarnation,
    )


async def delete_topic(worker: "Worker", _: "Connection", request: wire.DeleteTopic, __: memoryview) -> Reply:
    await worker.engine.delete_topic(request.topic)
    for partition in _partitions_of(worker, request.topic):
        partition.close(TopicNotFound(f"topic {request.topic!r} was deleted"))
    await worker.member.topics_changed(request.topic)
    return DONE


def _partitions_of(worker: "Worker", topic: str) -> list[Partition]:
    return [partition for partition in list(worker.partitions.values()) if partition.topic == topic]


async def topics(worker: "Worker", _: "Connection", __: wire.Topics, ___: memoryview) -> Reply:
    return wire.Properties(), wire.pack(await worker.engine.topics())


async def describe_topic(
    worker: "Worker", _: "Connection", request: wire.DescribeTopic, __: memoryview
) -> Reply:
    settings = await worker.engine.describe_topic(request.topic)
    counts = None
    if request.counts:
        counts = await inspection.count_topic(worker.engine.store, request.topic, settings.partitions)
    return _described(settings, counts), b""


# Subscriptions


async def create_subscription(
    worker: "Worker", _: "Connection", request: wire.CreateSubscription, __: memoryview
) -> Reply:
    backoff = None if request.backoff is None else Backoff(*request.backoff)
    settings = SubscriptionSettings(request.mode, request.delivery, request.lease_ms, backoff)
    await create_at(worker, request.topic, request.subscription, settings, request.start, request.exist_ok)
    return DONE


async def create_at(
    worker: "Worker", topic: str, name: str, settings: SubscriptionSettings, start: str, exist_ok: bool
) -> None:
    place, partition = await _position_in(worker, topic, start)
    await worker.engine.create_subscription(
        topic, name, settings, start=place, partition=partition, exist_ok=exist_ok
    )


async def _position_in(worker: "Worker", topic: str, text: str) -> tuple[str | int | datetime, int | None]:
    """A position as it is written on the wire, and the partition that it is about, if it is one.

    An id is of one topic for ever, and not of another one of that name.
    """
    place, partition, ledger = parse_position(text)
    if ledger and partition is not None:
        await worker.engine.check_ledger(topic, partition, ledger)
    return place, partition


def parse_position(text: str) -> tuple[str | int | datetime, int | None, int]:
    """A position, the partition that it is about, if it is one, and the ledger; 0 where that is no matter."""
    if text in ("latest", "earliest"):
        return text, None, 0
    kind, _, rest = text.partition(":")
    if kind == "time" and rest.isdecimal() and len(rest) < 14:
        return datetime.fromtimestamp(int(rest) / 1_000, UTC), None, 0
    ledger, _, entry = rest.partition("-")
    if all(part.isdecimal() and len(part) < 15 for part in (kind, ledger, entry)):
        return int(entry), int(kind), int(ledger)
    raise InvalidArgument(
        f"position {text[:60]!r}: use 'earliest', 'latest', 'time:<ms>' or an id like '3:1-42'"
    )


async def delete_subscription(
    worker: "Worker", _: "Connection", request: wire.DeleteSubscription, __: memoryview
) -> Reply:
    await worker.engine.delete_subscription(request.topic, request.subscription)
    deleted = SubscriptionNotFound(f"subscription {request.subscription!r} of {request.topic!r} was deleted")
    for partition in _partitions_of(worker, request.topic):
        if dispatcher := partition.dispatchers.get(request.subscription):
            dispatcher.end_all(deleted)
    await _feed(worker, request)
    return DONE


async def _feed(
    worker: "Worker", changed: wire.DeleteSubscription | wire.ChangeSubscription | wire.Seek
) -> None:
    """Let the dispatchers of a subscription look again, on all workers."""
    worker.feed(changed.topic, changed.subscription)
    await worker.engine.announce(f"subscription {changed.topic} {changed.subscription}")


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
    await _feed(worker, request)
    return DONE


async def seek(worker: "Worker", _: "Connection", request: wire.Seek, __: memoryview) -> Reply:
    place, partition = await _position_in(worker, request.topic, request.position)
    await worker.engine.describe_subscription(request.topic, request.subscription)
    await worker.engine.seek(request.topic, request.subscription, place, partition)
    await _feed(worker, request)
    return DONE


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
