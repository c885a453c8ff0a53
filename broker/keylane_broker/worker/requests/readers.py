"""What readers ask: logs by position, and to say how far they are."""

import asyncio
from typing import TYPE_CHECKING

from keylane import wire
from keylane.wire import lines as as_sent
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Committed
from keylane_broker.worker.requests.topics import Reply

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker

_STEPS = 20  # of a commit in one frame, each of a thousand entries: in so many partitions at once, or in one


async def read(worker: "Worker", _: "Connection", request: wire.Read, __: memoryview) -> Reply:
    lines = await worker.engine.read(
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


async def offsets(worker: "Worker", _: "Connection", request: wire.Offsets, __: memoryview) -> Reply:
    if request.subscription:
        await worker.engine.describe_subscription(request.topic, request.subscription)  # or a near name
    found = await worker.engine.offsets(request.topic, request.subscription, request.ledgers)
    return wire.Properties(), wire.pack(found)


async def owed(worker: "Worker", _: "Connection", request: wire.Owed, __: memoryview) -> Reply:
    if not request.position:  # else it was there a moment ago
        count = (await worker.engine.describe_topic(request.topic)).partitions
        check_int("partition", request.partition, 0, count - 1)
    names, position = await worker.engine.owed(request.topic, request.partition, request.position)
    if request.before:
        names = [name for name in names if name < request.before]
    return wire.OwedReply(position), wire.pack(names)


async def claim(worker: "Worker", _: "Connection", request: wire.Claim, __: memoryview) -> Reply:
    topic, subscription, reader = request.topic, request.subscription, request.reader
    await worker.engine.describe_subscription(topic, subscription)  # or a near name
    if request.release:
        await worker.engine.release_claim(topic, subscription, reader)
        return wire.ClaimReply(False), b""
    claimed = await worker.engine.claim(
        topic,
        subscription,
        reader,
        request.session_ms,
        incarnation=request.incarnation,
        subscription_incarnation=request.subscription_incarnation,
    )
    said = wire.ClaimReply(claimed.granted, claimed.holder, claimed.remaining_ms)
    return said, b""


async def commit(worker: "Worker", _: "Connection", request: wire.Commit, __: memoryview) -> Reply:
    engine, topic, subscription = worker.engine, request.topic, request.subscription
    await engine.describe_subscription(topic, subscription)  # or a near name
    positions = list(request.positions.items())
    steps = max(1, _STEPS // max(len(positions), 1))
    steps_done = 0
    done: list[int] = []
    for at in range(0, len(positions), _STEPS):
        some = positions[at : at + _STEPS]
        found = await asyncio.gather(
            *(
                engine.commit(
                    topic,
                    subscription,
                    request.reader,
                    partition,
                    position,
                    sought=request.sought.get(partition, 0),
                    ledger=request.ledgers.get(partition, 0),
                    incarnation=request.incarnation,
                    subscription_incarnation=request.subscription_incarnation,
                    steps=steps,
                )
                for partition, position in some
            ),
            return_exceptions=True,
        )
        for (partition, ___), answer in zip(some, found, strict=True):
            if isinstance(answer, Committed):
                steps_done += answer.steps
                done += [partition] if answer.done else []
        errors = [answer for answer in found if isinstance(answer, BaseException)]
        if errors and not steps_done:
            raise errors[0]
        if errors:
            break  # it comes again
    return wire.CommitReply(done), b""
