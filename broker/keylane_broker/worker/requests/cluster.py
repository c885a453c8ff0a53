"""What operators ask about the cluster, and tell it."""

from typing import TYPE_CHECKING

from keylane import wire
from keylane_broker.cluster.load import loads_of
from keylane_broker.engine.checks import check_int
from keylane_broker.inspect import counts as inspection
from keylane_broker.worker.requests.topics import DONE, Reply

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker


async def cluster(worker: "Worker", _: "Connection", request: wire.Cluster, __: memoryview) -> Reply:
    member = worker.member
    await member.refresh()
    workers = [member.report(report) for report in member.workers.values()]
    reply = wire.ClusterReply(member.controller, member.version, workers)
    return reply, wire.pack(await _partitions(worker, request.topic)) if request.topic else b""


async def _partitions(worker: "Worker", topic: str) -> list[wire.PartitionReport]:
    member = worker.member
    _, owners = await member.placement(topic)
    loads = {
        place: rate for report in member.workers.values() for place, rate in loads_of(report.load).items()
    }
    states = await inspection.ledgers(worker.engine.store, topic, range(len(owners)))
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


async def rebalance(worker: "Worker", _: "Connection", request: wire.Rebalance, __: memoryview) -> Reply:
    return wire.Properties(), wire.pack(await worker.member.rebalance(request.dry_run))


async def move_partition(
    worker: "Worker", _: "Connection", request: wire.MovePartition, __: memoryview
) -> Reply:
    count = (await worker.engine.describe_topic(request.topic)).partitions
    check_int("partition", request.partition, 0, count - 1)
    await worker.member.move(request.topic, request.partition, request.worker, request.keep)
    return DONE


async def drain(worker: "Worker", _: "Connection", request: wire.Drain, __: memoryview) -> Reply:
    await worker.member.drain(request.worker, request.draining)
    return DONE
