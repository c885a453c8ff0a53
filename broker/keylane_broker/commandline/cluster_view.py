"""What `keylane cluster` shows: tables of workers and partitions, and warnings for an operator."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from keylane import ClusterReport, LedgerInfo, PartitionInfo, PartitionMove
from keylane.commandline.output import CommandError, UsageError
from keylane.commandline.words import count_of

__all__ = [
    "MOVE_COLUMNS",
    "PARTITION_COLUMNS",
    "WORKER_COLUMNS",
    "find_worker",
    "move_rows",
    "partition_rows",
    "partition_warnings",
    "totals",
    "worker_rows",
    "worker_warnings",
]

WORKER_COLUMNS = ["worker", "address", "state", "partitions", "msg/s", "ms/s", "heard"]
PARTITION_COLUMNS = ["partition", "worker", "lease", "epoch", "msg/s", "ms/s", "remaining by ledger"]
MOVE_COLUMNS = ["topic", "partition", "from", "to", "why"]
NAMED = 5  # of a long list
LEDGERS = 3  # the newest, in a table


def worker_rows(report: ClusterReport, now: datetime) -> list[Sequence[object]]:
    """A line for each worker; the controller has a star."""
    return [
        (
            f"{worker.id} *" if worker.id == report.controller else worker.id,
            worker.address,
            worker.state,
            worker.partitions,
            round(worker.messages_per_second),
            round(worker.script_time * 1_000, 1),
            _ago(now - worker.heartbeat_at),
        )
        for worker in sorted(report.workers, key=lambda worker: _natural(worker.id))
    ]


def totals(report: ClusterReport) -> str:
    """The cluster in one line."""
    serving = [worker for worker in report.workers if worker.state != "lost"]
    messages = round(sum(worker.messages_per_second for worker in serving))
    script_ms = round(sum(worker.script_time for worker in serving) * 1_000)
    partitions = sum(worker.partitions for worker in report.workers)
    return (
        f"{count_of(len(serving), 'worker')}, {count_of(partitions, 'partition')}, "
        f"{messages:,} messages/s, {script_ms:,} ms/s in scripts; "
        f"* is the controller (change {report.version})"
    )


def worker_warnings(report: ClusterReport, now: datetime) -> list[str]:
    """What is wrong with the workers, and what to do about it."""
    found = [
        f"{worker.id} at {worker.address} has not been heard from for {_ago(now - worker.heartbeat_at, '')}: "
        "others have taken over its partitions, or will in a moment; see its log, and restart it"
        for worker in report.workers
        if worker.state == "lost"
    ]
    if report.workers and not any(worker.state == "serving" for worker in report.workers):
        found.append(
            "no worker takes partitions: start one, or undo a drain (`keylane cluster drain WORKER --undo`)"
        )
    if not report.controller:
        found.append(
            "no worker is the controller: if this lasts more than a few seconds, look for errors in the logs"
        )
    releases = sorted({worker.release for worker in report.workers if worker.state != "lost"})
    if len(releases) > 1:
        found.append(f"workers run different releases: {', '.join(releases)}; finish the update")
    return found


def partition_rows(partitions: Sequence[PartitionInfo]) -> list[Sequence[object]]:
    """A line for each partition: who is to serve it, who does, and what it still has."""
    width = len(str(len(partitions)))
    return [
        (
            str(info.partition).rjust(width),  # a name, not an amount
            info.worker or None,
            _lease(info),
            str(info.epoch),  # so is this
            round(info.messages_per_second),
            round(info.script_time * 1_000, 1),
            _ledgers(info.ledgers),
        )
        for info in partitions
    ]


def partition_warnings(topics: Mapping[str, Sequence[PartitionInfo]]) -> list[str]:
    """Which partitions nobody serves, and what to do about it."""
    everything = [(topic, info) for topic, partitions in topics.items() for info in partitions]
    ownerless = [f"{topic}:{info.partition}" for topic, info in everything if not info.worker]
    elsewhere = [
        f"{topic}:{info.partition}"
        for topic, info in everything
        if info.worker and info.holder != info.worker
    ]
    found = []
    if ownerless:
        found.append(
            f"{count_of(len(ownerless), 'partition')} without an owner ({_some(ownerless)}): if this lasts, "
            "see the log of the controller, and start another worker"
        )
    if elsewhere:
        found.append(
            f"{count_of(len(elsewhere), 'partition')} whose owner does not hold the lease "
            f"({_some(elsewhere)}): normal for a few seconds after a worker was lost; "
            "if this lasts, see the owner's log"
        )
    return found


def move_rows(moves: Sequence[PartitionMove]) -> list[Sequence[object]]:
    """A line for each move."""
    return [(move.topic, move.partition, move.source or None, move.target, move.reason) for move in moves]


def find_worker(name: str, ids: Sequence[str]) -> str:
    """The worker of this id, or the only one whose id begins with it."""
    if name in ids:
        return name
    meant = sorted((known for known in ids if known.startswith(name)), key=_natural)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UsageError(f"ambiguous worker {name!r}: {', '.join(meant)}")
    known = ", ".join(sorted(ids, key=_natural))
    raise CommandError(f"no worker {name!r}; there are {known}")


def _lease(info: PartitionInfo) -> str | None:
    """How long the lease lasts unless it is renewed, and who has it if that is not the owner."""
    if not info.holder:
        return None
    left = f"{info.lease:.1f} s"
    return left if info.holder == info.worker else f"{info.holder}, {left}"


def _ledgers(ledgers: Sequence[LedgerInfo]) -> str:
    """The newest ledgers; those before them count together."""
    newest = [f"{ledger.ledger}: {ledger.remaining:,}" for ledger in ledgers[-LEDGERS:]]
    before = ledgers[:-LEDGERS]
    if before:
        newest.insert(0, f"{len(before)} older: {sum(ledger.remaining for ledger in before):,}")
    return ", ".join(newest) or "-"


def _ago(past: timedelta, ago: str = " ago") -> str:
    """A short time, as people say it."""
    seconds = max(0.0, past.total_seconds())
    return f"{seconds:.1f} s{ago}" if seconds < 10 else f"{seconds:.0f} s{ago}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts worker-10 after worker-9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part]
