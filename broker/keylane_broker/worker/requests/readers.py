"""What readers ask: logs by position, and to say how far they are."""

from keylane import wire
from keylane.wire import lines as as_sent
from keylane_broker.engine.checks import check_int
from keylane_broker.worker import committing
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply


async def read(context: Context, _: Connection, request: wire.Read, __: memoryview) -> Reply:
    lines = await context.engine.read(
        request.topic,
        request.partition,
        request.start,
        request.end,
        limit=request.limit,
        journal=request.journal,
        incarnation=request.incarnation,
    )
    ledgers = "" if request.journal else lines.ledgers
    body = lines.answers if request.raw else as_sent.read(lines.answers)
    return wire.ReadReply(lines.next, ledgers), wire.pack(body)


async def offsets(context: Context, _: Connection, request: wire.Offsets, __: memoryview) -> Reply:
    if request.subscription:
        await context.engine.describe_subscription(request.topic, request.subscription)  # or a near name
    found = await context.engine.offsets(request.topic, request.subscription, request.ledgers)
    return wire.Properties(), wire.pack(found)


async def owed(context: Context, _: Connection, request: wire.Owed, __: memoryview) -> Reply:
    if not request.position:  # else it was there a moment ago
        count = (await context.engine.describe_topic(request.topic)).partitions
        check_int("partition", request.partition, 0, count - 1)
    names, position = await context.engine.owed(request.topic, request.partition, request.position)
    if request.before:
        names = [name for name in names if name < request.before]
    return wire.OwedReply(position), wire.pack(names)


async def claim(context: Context, _: Connection, request: wire.Claim, __: memoryview) -> Reply:
    topic, subscription, reader = request.topic, request.subscription, request.reader
    await context.engine.describe_subscription(topic, subscription)  # or a near name
    if request.release:
        await context.engine.release_claim(topic, subscription, reader)
        return wire.ClaimReply(False), b""
    claimed = await context.engine.claim(
        topic,
        subscription,
        reader,
        request.session_ms,
        incarnation=request.incarnation,
        subscription_incarnation=request.subscription_incarnation,
    )
    said = wire.ClaimReply(claimed.granted, claimed.holder, claimed.remaining_ms)
    return said, b""


async def commit(context: Context, _: Connection, request: wire.Commit, __: memoryview) -> Reply:
    await context.engine.describe_subscription(request.topic, request.subscription)  # or a near name
    return wire.CommitReply(await committing.commit(context.engine, request)), b""
