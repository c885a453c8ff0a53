"""The workers and their partitions, and what operators tell them."""

import msgspec

from keylane.wire.frames import Properties, Type


class Cluster(Properties, frozen=True):
    """CLUSTER; answered by OK with ClusterReply and, for a topic, an array of PartitionReport in the body."""

    TYPE = Type.CLUSTER

    topic: str = ""


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker as the cluster sees it; `state` is serving, draining, stopping or lost."""

    id: str
    address: str
    release: str
    state: str
    started_ms: int
    heartbeat_ms: int  # when it was last heard of
    partitions: int  # that it is to serve
    messages: float  # published and delivered, a second
    script_ms: float  # time that its scripts took in Redis, a second


class ClusterReply(Properties, frozen=True):
    """The workers, and who places the partitions; `version` counts the changes of placement."""

    controller: str
    version: int
    workers: list[WorkerReport]


class Ledger(msgspec.Struct, frozen=True):
    """What was published in one epoch of a partition: from entry `first` on, of which some remain."""

    ledger: int
    first: int
    remaining: int


class PartitionReport(msgspec.Struct, frozen=True):
    """A partition: who is to serve it, who holds its lease in which epoch, and its ledgers, oldest first."""

    partition: int
    worker: str
    holder: str  # "" while nobody has the lease
    epoch: int
    lease_ms: int  # until the lease ends, unless it is renewed
    ledgers: list[Ledger]
    messages: float  # as in WorkerReport
    script_ms: float


class Rebalance(Properties, frozen=True):
    """REBALANCE: place partitions by counts and load now; answered by OK with Moves in the body."""

    TYPE = Type.REBALANCE

    dry_run: bool = False


class Move(msgspec.Struct, frozen=True):
    """A partition that gets another owner; `source` is "" where it had none."""

    topic: str
    partition: int
    source: str
    target: str
    reason: str  # why, for people


class MovePartition(Properties, frozen=True):
    """MOVE_PARTITION: give a partition to a worker; answered by OK when that is decided.

    If another must come back for it, so that counts stay even, then none of `keep`, if there is a choice.
    """

    TYPE = Type.MOVE_PARTITION

    topic: str
    partition: int
    worker: str
    keep: list[tuple[str, int]] = []  # topic, partition


class Drain(Properties, frozen=True):
    """DRAIN: take all partitions from a worker until it is started again, or undo that; answered by OK."""

    TYPE = Type.DRAIN

    worker: str
    draining: bool = True
