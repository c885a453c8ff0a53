"""What operators ask about the cluster, and tell it."""

from keylane import wire
from keylane_broker.cluster.load import loads_of
from keylane_broker.engine.checks import check_int
from keylane_broker.inspect import counts as inspection
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import DONE, Reply


async def cluster(context: Context, _: Connection, request: wire.Cluster, __: memoryview) -> Reply:
    membership = context.membership
    await membership.refresh()
    workers = [membership.report(report) for report in membership.workers.values()]
    reply = wire.ClusterReply(membership.controller_id, membership.version, workers)
    return reply, wire.pack(await _partitions(context, request.topic)) if request.topic else b""


async def _partitions(context: Context, topic: str) -> list[wire.PartitionReport]:
    membership = context.membership
    _, owners = await membership.placement(topic)
    loads = {
        place: rate for report in membership.workers.values() for place, rate in loads_of(report.load).items()
    }
    states = await inspection.ledgers(context.engine.store, topic, range(len(owners)))
    return [
        wire.PartitionReport(
            number,
            owner,
            state.worker,
            state.epoch,
            state.left_ms,
            [wire.Ledger(ledger.ledger, ledger.first, ledger.entries) for ledger in state.ledgers],
            *loads.get((topic, number), (0.0, 0.0)),
        )
        for number, (owner, state) in enumerate(zip(owners, states, strict=True))
    ]


async def rebalance(context: Context, _: Connection, request: wire.Rebalance, __: memoryview) -> Reply:
    return wire.Properties(), wire.pack(await context.membership.rebalance(request.dry_run))


async def move_partition(
    context: Context, _: Connection, request: wire.MovePartition, __: memoryview
) -> Reply:
    count = (await context.engine.describe_topic(request.topic)).partitions
    check_int("partition", request.partition, 0, count - 1)
    await context.membership.move(request.topic, request.partition, request.worker, request.keep)
    return DONE


async def drain(context: Context, _: Connection, request: wire.Drain, __: memoryview) -> Reply:
    await context.membership.drain(request.worker, request.draining)
    return DONE
