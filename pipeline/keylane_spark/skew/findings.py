"""What a look at skew has found, and what to do about it."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from keylane.commandline.rebalance_plan import PlannedMove
from keylane.commandline.words import count_of
from keylane_spark.skew import packing
from keylane_spark.skew.packing import Candidate, Placement, imbalance


class HotKey(msgspec.Struct, frozen=True):
    """One of the keys with most messages."""

    key: str
    messages: int
    share: float  # of all messages
    partition: int  # that it hashes to


class HotPartition(msgspec.Struct, frozen=True):
    """How much a partition has."""

    partition: int
    messages: int
    share: float


class Span(msgspec.Struct, frozen=True):
    """A span of time: how many messages, and the busiest partition over the mean."""

    at_ms: int
    messages: int
    imbalance: float


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's share of the messages now, and with the plan."""

    worker: str
    partitions: int
    before: float
    after: float


class Cluster(msgspec.Struct, frozen=True):
    """Who serves the partitions of the topic, by partition, and who could."""

    owners: dict[int, str]
    workers: list[str]


class Keys(msgspec.Struct, frozen=True):
    """Messages with a key, counted."""

    by_hash: dict[int, int]  # hash % packing.PERIOD -> messages
    known: int  # keys
    misplaced: int  # messages that are not where their key hashes to
    hottest: list[HotKey]  # shares are of messages with a key

    @property
    def messages(self) -> int:
        """All of them."""
        return sum(self.by_hash.values())


class Times(msgspec.Struct, frozen=True):
    """Messages by the span in which they were published, and by partition."""

    width_ms: int
    spans: dict[int, dict[int, int]]

    def loads(self, count: int) -> dict[int, int]:
        """Messages by partition."""
        found = dict.fromkeys(range(count), 0)
        for span in self.spans.values():
            for partition, messages in span.items():
                found[partition] = found.get(partition, 0) + messages
        return found


class Skew(msgspec.Struct, frozen=True):
    """What was found, and what to do."""

    topic: str
    made_at: datetime
    source: str
    messages: int
    keyless: int
    keys: int
    misplaced: int  # messages that are not in the partition that their key hashes to
    partitions: list[HotPartition]
    imbalance: float
    hot_keys: list[HotKey]
    span_ms: int
    spans: list[Span]  # those with messages
    candidates: list[Candidate]
    recommended: int | None  # another number of partitions; None: those that there are do
    advice: list[str]
    workers: list[WorkerLoad]
    moves: list[PlannedMove]  # none where they are not worth it
    moved: float  # share of the messages whose worker the moves change


def conclude(
    topic: str, keys: Keys, times: Times, cluster: Cluster, source: str, *, by_journal: bool = False
) -> Skew:
    """Say what counts mean; with a journal, times are of all that was published, and keys of what is left."""
    count, workers = len(cluster.owners), len(cluster.workers)
    loads = times.loads(count)
    total = sum(loads.values())
    keyless = 0 if by_journal else max(0, total - keys.messages)
    hottest = [
        msgspec.structs.replace(key, share=key.messages / (keys.messages + keyless)) for key in keys.hottest
    ]
    there = {number: loads[number] for number in range(count)}  # an archive may know more from earlier days
    found = packing.candidates(keys.by_hash, keyless, workers, there)
    now = next(one for one in found if one.partitions == count)
    best = packing.recommend(found, count)
    placement = packing.place(there, cluster.owners, cluster.workers)
    owners = placement.owners if placement.worth else cluster.owners
    return Skew(
        topic=topic,
        made_at=datetime.now(UTC),
        source=f"{source}; rates from the journal" if by_journal else source,
        messages=total,
        keyless=keyless,
        keys=keys.known,
        misplaced=keys.misplaced,
        partitions=[HotPartition(at, load, load / max(1, total)) for at, load in sorted(loads.items())],
        imbalance=imbalance(list(loads.values())),
        hot_keys=hottest,
        span_ms=times.width_ms,
        spans=_spans(times, count),
        candidates=found,
        recommended=best.partitions if best else None,
        advice=advice_of(hottest, now, best, placement, workers),
        workers=_workers(there, cluster, owners),
        moves=_moves(topic, cluster, owners),
        moved=placement.moved if placement.worth else 0.0,
    )


def _spans(times: Times, count: int) -> list[Span]:
    return [
        Span(at_ms, sum(span.values()), imbalance([span.get(number, 0) for number in range(count)]))
        for at_ms, span in sorted(times.spans.items())
    ]


def _workers(loads: Mapping[int, int], cluster: Cluster, owners: Mapping[int, str]) -> list[WorkerLoad]:
    total = max(1, sum(loads.values()))
    before, after = (packing.worker_loads(loads, at, cluster.workers) for at in (cluster.owners, owners))
    serving = list(cluster.owners.values())
    return [
        WorkerLoad(worker, serving.count(worker), before[worker] / total, after[worker] / total)
        for worker in cluster.workers
    ]


def _moves(topic: str, cluster: Cluster, owners: Mapping[int, str]) -> list[PlannedMove]:
    return [
        PlannedMove(topic, partition, worker)
        for partition, worker in sorted(owners.items())
        if cluster.owners[partition] != worker
    ]


def advice_of(
    hot_keys: Sequence[HotKey],
    now: Candidate,
    best: Candidate | None,
    placement: Placement,
    workers: int,
) -> list[str]:
    """What to do, in sentences: about keys, the number of partitions, and where they are."""
    said = [_about_count(now, best, workers), _about_moves(placement, now.partitions)]
    if workers > 1 and hot_keys and hot_keys[0].share * workers > 1:
        said.insert(0, _about_key(hot_keys[0], workers))
    return said


def _about_key(key: HotKey, workers: int) -> str:
    return (
        f"key {key.key!r} alone has {key.share:.0%} of the messages: one key is one lane in one "
        f"partition, so one of {workers} workers has at least {key.share * workers:.2f} times the mean, "
        "whatever the number of partitions; to spread it, make its key finer"
    )


def _about_count(now: Candidate, best: Candidate | None, workers: int) -> str:
    if best is None and now.workers > packing.GOOD:
        return f"no other number of partitions would be much more even than {now.partitions}"
    if best is None:
        return f"{count_of(now.partitions, 'partition')} {'is' if now.partitions == 1 else 'are'} enough"
    return (
        f"{count_of(best.partitions, 'partition')} would be more even than {now.partitions}: the busiest of "
        f"{workers} workers would have {best.workers:.2f} instead of {now.workers:.2f} times the mean, at "
        "best; the partition count of a topic is fixed, so create a new one and replay"
    )


def _about_moves(placement: Placement, partitions: int) -> str:
    change = f"from {placement.before:.2f} to {placement.after:.2f} times the mean"
    if not placement.gain:
        return "not worth moving: no other placement of the partitions is better by more than moving costs"
    if not placement.worth:
        return (
            f"not worth moving: the best placement would bring the busiest worker {change}, "
            f"and move {placement.moved:.0%} of the messages for it"
        )
    moved = count_of(placement.moves, "partition")
    return (
        f"the plan moves {moved} of {partitions}, with {placement.moved:.0%} of the messages: the busiest "
        f"worker comes {change}"
    )
