"""What is asked of topics."""

from keylane import wire
from keylane.errors import TopicNotFound
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import TopicSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import DONE, Reply


async def create_topic(context: Context, _: Connection, request: wire.CreateTopic, __: memoryview) -> Reply:
    limit = context.settings.max_partitions
    partitions = context.settings.default_partitions if request.partitions is None else request.partitions
    check_int("partitions", partitions, 1, limit)
    settings = TopicSettings(partitions, journal=request.journal or 0)
    if request.dedupe_ms is not None:
        settings = TopicSettings(partitions, dedupe_ms=request.dedupe_ms, journal=request.journal or 0)
    made = await context.engine.create_topic(request.topic, settings, exist_ok=request.exist_ok)
    await context.membership.topics_changed()
    counts = await _counted(context, request.topic, made) if request.exist_ok else None
    return _described(made, counts), b""


async def change_topic(context: Context, _: Connection, request: wire.ChangeTopic, __: memoryview) -> Reply:
    settings = await context.engine.change_topic(request.topic, journal=request.journal)
    return _described(settings, await _counted(context, request.topic, settings)), b""


async def _counted(context: Context, topic: str, settings: TopicSettings) -> inspection.TopicCounts:
    return await inspection.count_topic(context.engine.store, topic, settings.partitions)


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


async def delete_topic(context: Context, _: Connection, request: wire.DeleteTopic, __: memoryview) -> Reply:
    await context.engine.delete_topic(request.topic)
    for partition in context.partitions.of_topic(request.topic):
        partition.close(TopicNotFound(f"topic {request.topic!r} was deleted"))
    await context.membership.topics_changed(request.topic)
    return DONE


async def topics(context: Context, _: Connection, __: wire.Topics, ___: memoryview) -> Reply:
    return wire.Properties(), wire.pack(await context.engine.topics())


async def describe_topic(
    context: Context, _: Connection, request: wire.DescribeTopic, __: memoryview
) -> Reply:
    settings = await context.engine.describe_topic(request.topic)
    counts = await _counted(context, request.topic, settings) if request.counts else None
    return _described(settings, counts), b""
