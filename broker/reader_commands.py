"""What readers ask: logs by position, and to say how far they are."""

from typing import TYPE_CHECKING

from broker.arguments import MAX_PARTITIONS, check_int
from broker.topic_commands import Reply
from client import wire

if TYPE_CHECKING:
    from broker.connection import Connection
    from broker.worker import Worker

_STEPS = 20  # of a commit in one frame: so many thousand entries


async def read(worker: "Worker", _: "Connection", request: wire.Read, __: memoryview) -> Reply:
    lines = await worker.engine.read(
        request.topic,
        request.partition,
        request.start,
        request.end,
        limit=request.limit,
        journal=request.journal,
    )
    ledgers = "" if request.journal else lines.ledgers
    return wire.ReadReply(lines.next, ledgers), wire.pack((lines.ranges, lines.flat))


async def offsets(worker: "Worker", _: "Connection", request: wire.Offsets, __: memoryview) -> Reply:
    if request.subscription:
        await worker.engine.describe_subscription(request.topic, request.subscription)  # or a near name
    return wire.Properties(), wire.pack(await worker.engine.offsets(request.topic, request.subscription))


async def claim(worker: "Worker", _: "Connection", request: wire.Claim, __: memoryview) -> Reply:
    topic, subscription, reader = request.topic, request.subscription, request.reader
    await worker.engine.describe_subscription(topic, subscription)  # or a near name
    if request.release:
        await worker.engine.release_claim(topic, subscription, reader)
        return wire.ClaimReply(False), b""
    claimed = await worker.engine.claim(topic, subscription, reader, request.session_ms)
    return wire.ClaimReply(claimed.granted, claimed.holder, claimed.remaining_ms), b""


async def commit(worker: "Worker", _: "Connection", request: wire.Commit, __: memoryview) -> Reply:
    topic, subscription, reader = request.topic, request.subscription, request.reader
    await worker.engine.describe_subscription(topic, subscription)
    for partition in request.positions:
        check_int("partition", partition, 0, MAX_PARTITIONS)
    names: list[str] = []
    steps, done = _STEPS, list[int]()
    for partition, position in request.positions.items():
        committed = await worker.engine.commit(topic, subscription, reader, partition, position, steps=steps)
        names += committed.names
        steps -= committed.steps
        if committed.done:
            done.append(partition)
        if steps <= 0 or not committed.done:
            break
    return wire.CommitReply(done), wire.pack(names)
