"""What is asked of topics."""

import msgspec

from keylane import wire
from keylane.errors import TopicExists, TopicNotFound
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import TopicSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.differences import differences
from keylane_broker.worker.request_turns import DONE, Reply

_HOT = 20  # keys of a partition that are told


async def create_topic(context: Context, _: Connection, request: wire.CreateTopic, __: memoryview) -> Reply:
    limit = context.settings.max_partitions
    partitions = context.settings.default_partitions if request.partitions is None else request.partitions
    check_int("partitions", partitions, 1, limit)
    retention_ms = request.retention_ms
    if retention_ms is None:
        retention_ms = 0 if request.retention_bytes else round(context.settings.retention * 1_000)
    settings = TopicSettings(
        partitions,
        journal=request.journal or 0,
        retention_ms=retention_ms,
        retention_bytes=request.retention_bytes,
        ttl_ms=request.ttl_ms,
        backlog_quota=request.backlog_quota,
        backlog_quota_bytes=request.backlog_quota_bytes,
        spread=request.spread,
        inline=request.inline,
    )
    if request.dedupe_ms is not None:
        settings = msgspec.structs.replace(settings, dedupe_ms=request.dedupe_ms)
    made = await context.engine.create_topic(request.topic, settings, exist_ok=request.exist_ok)
    await context.membership.topics_changed()
    if other := differences(
        {
            "partitions": request.partitions,
            "dedupe_ms": request.dedupe_ms,
            "journal": request.journal,
            "retention_ms": request.retention_ms or None,
            "retention_bytes": request.retention_bytes or None,
            "ttl_ms": request.ttl_ms or None,
            "backlog_quota": request.backlog_quota or None,
            "backlog_quota_bytes": request.backlog_quota_bytes or None,
            "spread": request.spread if request.spread > 1 else None,
            "inline": request.inline or None,
        },
        msgspec.structs.asdict(made),
    ):
        raise TopicExists(
            f"topic {request.topic!r} exists with {other}: omit that, or change the topic (not partitions "
            "or inline)"
        )
    counts = await _counted(context, request.topic, made) if request.exist_ok else None
    return _described(made, counts), b""


async def change_topic(context: Context, _: Connection, request: wire.ChangeTopic, __: memoryview) -> Reply:
    settings = await context.engine.change_topic(
        request.topic,
        journal=request.journal,
        retention_ms=request.retention_ms,
        retention_bytes=request.retention_bytes,
        ttl_ms=request.ttl_ms,
        backlog_quota=request.backlog_quota,
        backlog_quota_bytes=request.backlog_quota_bytes,
        spread=request.spread,
        dedupe_ms=request.dedupe_ms,
    )
    await context.partitions.topic_changed(request.topic)
    if request.spread is not None:
        await context.membership.topics_changed()
    return _described(settings, await _counted(context, request.topic, settings)), b""


async def _counted(context: Context, topic: str, settings: TopicSettings) -> inspection.TopicCounts:
    return await inspection.count_topic(context.engine.store, topic, settings.partitions)


def _described(settings: TopicSettings, counts: inspection.TopicCounts | None = None) -> wire.TopicReply:
    counts = counts or inspection.TopicCounts()
    return wire.TopicReply(
        settings.partitions,
        settings.dedupe_ms,
        settings.retention_ms,
        settings.retention_bytes,
        settings.ttl_ms,
        settings.backlog_quota,
        counts.subscriptions,
        counts.messages,
        counts.published,
        settings.journal,
        counts.delayed,
        settings.incarnation,
        settings.backlog_quota_bytes,
        settings.spread,
        settings.inline,
    )


async def delete_topic(context: Context, _: Connection, request: wire.DeleteTopic, __: memoryview) -> Reply:
    await context.engine.delete_topic(request.topic)
    for partition in context.partitions.of_topic(request.topic):
        partition.close(TopicNotFound(f"topic {request.topic!r} was deleted"))
    await context.membership.topics_changed(request.topic)
    return DONE


async def hot_keys(context: Context, _: Connection, request: wire.HotKeys, __: memoryview) -> Reply:
    await context.engine.describe_topic(request.topic)
    served = [one.hot_keys for one in context.partitions.of_topic(request.topic) if one.current_lease]
    found = [tuple(counted) for sketch in served for counted in sketch.hottest(_HOT)]
    return wire.HotKeysReply(sum(sketch.messages for sketch in served)), wire.pack(found)


async def topics(context: Context, connection: Connection, _: wire.Topics, __: memoryview) -> Reply:
    may = connection.identity.may
    return wire.Properties(), wire.pack(
        [name for name in await context.engine.topics() if may("observe", name)]
    )


async def describe_topic(
    context: Context, _: Connection, request: wire.DescribeTopic, __: memoryview
) -> Reply:
    settings = await context.engine.describe_topic(request.topic)
    counts = await _counted(context, request.topic, settings) if request.counts else None
    return _described(settings, counts), b""
