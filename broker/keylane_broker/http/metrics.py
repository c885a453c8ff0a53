"""/metrics: what a worker has counted, and what is before it, for Prometheus.

Counts are those of this worker since it started; backlogs are those of the partitions that it serves, so that
the sum over all workers is the cluster's.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.responses import Response

from keylane.errors import BrokerError
from keylane_broker.counters import MOST_SUBSCRIPTIONS, MOST_TOPICS, OTHER, Counters, Histogram
from keylane_broker.http.operations import Call, operation
from keylane_broker.inspect.backlog import Backlog, Backlogs, measure
from keylane_broker.worker.worker import Worker

_FRESH = 1.0  # seconds for which backlogs are not looked at again,
_SHARE = 100  # or so many times as long as a look takes: large brokers are looked at less often
_PATIENCE = 3.0  # seconds that a scrape waits for them; then it tells those of the last look

_TOPIC, _SUBSCRIPTION = ("topic",), ("topic", "subscription")


class _Counted(NamedTuple):
    """A total: the attribute of the counts, the name, and what it means."""

    attribute: str
    name: str
    what: str


_OF_TOPICS = (
    _Counted("published", "keylane_messages_published", "Messages stored, at once or for later."),
    _Counted("duplicates", "keylane_messages_duplicate", "Messages that were published before."),
    _Counted("no_subscribers", "keylane_messages_unowed", "Messages without a subscription, not stored."),
    _Counted("expired", "keylane_messages_expired", "Messages dropped because their time to live was over."),
)
_OF_SUBSCRIPTIONS = (
    _Counted("delivered", "keylane_messages_delivered", "Messages sent to consumers, again or not."),
    _Counted("redelivered", "keylane_messages_redelivered", "Of these, those with a retry count."),
    _Counted("acked", "keylane_messages_acked", "Messages settled by an ack, or at delivery."),
    _Counted("nacked", "keylane_messages_nacked", "Messages given back by a nack."),
    _Counted("released", "keylane_messages_released", "Messages given back by clients, uncharged."),
    _Counted("timed_out", "keylane_messages_timed_out", "Messages whose lease, or session, ended."),
    _Counted("stale", "keylane_messages_stale", "Messages settled too late, to no effect."),
    _Counted("dead_lettered", "keylane_messages_dead_lettered", "Messages without retries left."),
)
_OF_WORKER = (
    _Counted("connections", "keylane_connections_accepted", "Client connections, since the start."),
    _Counted("leases_taken", "keylane_partition_leases_taken", "Partition leases taken."),
    _Counted("leases_lost", "keylane_partition_leases_lost", "Partition leases lost to others."),
    _Counted("handed_over", "keylane_partitions_handed_over", "Partitions moved to other workers."),
    _Counted("fenced", "keylane_fenced_writes", "Calls refused since the lease was another's."),
    _Counted("redis_reconnects", "keylane_redis_reconnects", "Connections to Redis that were lost."),
)


class Metrics:
    """The metrics of a worker, as text."""

    def __init__(self, worker: Worker, version: str, *, on: bool = True) -> None:
        self._on = on
        self._backlogs = _BacklogLook(worker)
        self._registry = CollectorRegistry()
        self._registry.register(WorkerCollector(worker, version, lambda: self._backlogs.found))
        ProcessCollector(registry=self._registry)

    async def scrape(self, accepted: str) -> Response:
        """Answer a request whose Accept header says what is accepted."""
        if not self._on:
            raise HTTPException(404)
        await self._backlogs.look()
        encode, media_type = choose_encoder(accepted)
        return Response(encode(self._registry), headers={"Content-Type": media_type})

    def close(self) -> None:
        """Look at nothing any more."""
        self._backlogs.close()


@operation("GET", "/metrics", gives="text/plain")
async def metrics(call: Call) -> Response:
    """Tell Prometheus about this worker."""
    return await call.metrics(call.request.headers.get("accept", ""))


class _BacklogLook:
    """Looks at the backlogs of partitions when asked, but not all the time."""

    def __init__(self, worker: Worker) -> None:
        self.found = Backlogs()
        self._worker = worker
        self._again = 0.0  # when to look again, by the monotonic clock
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Look, unless that was just done; returns after some seconds in any case."""
        if self._looking is None or self._looking.done():
            if time.monotonic() < self._again:
                return
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait({self._looking}, timeout=_PATIENCE)

    async def _look(self) -> None:
        began = time.monotonic()
        try:
            self.found = await measure(self._worker.engine.store, self._worker.partitions.leased())
        except BrokerError:
            self.found = Backlogs()  # better none than old ones
        self._again = time.monotonic() + max(_FRESH, (time.monotonic() - began) * _SHARE)

    def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()


class WorkerCollector(Collector):
    """Reads what a worker has counted, when it is asked."""

    def __init__(self, worker: Worker, version: str, backlogs: Callable[[], Backlogs]) -> None:
        self._worker = worker
        self._version = version
        self._backlogs = backlogs

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        worker, counters = self._worker, self._worker.counters
        # Of a topic that was just made a partition may be in use before its owners are known here.
        used = {topic for topic, _ in worker.partitions.by_place}
        counters.forget_others(worker.membership.owners.keys() | used)
        yield from _totals(_OF_TOPICS, _TOPIC, (((name,), one) for name, one in counters.topics.items()))
        yield from _totals(_OF_SUBSCRIPTIONS, _SUBSCRIPTION, counters.subscriptions.items())
        yield from _totals(_OF_WORKER, (), [((), counters)])
        yield from self._backlog()
        yield from _histograms(counters)
        yield _labelled(
            "keylane_connections_dropped",
            "Client connections closed by the worker.",
            "reason",
            counters.drops,
        )
        yield _labelled(
            "keylane_errors", "Requests answered with an error, by its code.", "code", counters.errors
        )
        memory = worker.connections.memory
        yield _gauge("keylane_connections", "Client connections now.", len(worker.connections.all))
        yield _gauge("keylane_inflight_bytes", "Publishes that wait for Redis.", memory.inflight)
        yield _gauge("keylane_unsent_bytes", "What waits for clients to read.", memory.unsent)
        yield _gauge(
            "keylane_partition_leases", "Partitions that it serves.", len(worker.partitions.leased())
        )
        yield _gauge(
            "keylane_partitions_without_lease",
            "Partitions that it should serve, and has no lease of.",
            worker.partitions.without_lease(),
        )
        info = GaugeMetricFamily("keylane_worker_info", "Which worker this is.", labels=("worker", "version"))
        info.add_metric((worker.id, self._version), 1)
        yield info

    def _backlog(self) -> Iterator[Metric]:
        found, now_ms = self._backlogs(), self._worker.clock.now_ms()
        delayed = GaugeMetricFamily("keylane_delayed_messages", "Messages for later.", labels=_TOPIC)
        stored = GaugeMetricFamily("keylane_stored_messages", "Messages in the log.", labels=_TOPIC)
        for family, counts in ((delayed, found.delayed), (stored, found.messages)):
            for name, count in _bounded(counts).items():
                family.add_metric((name,), count)
            yield family
        backlog = GaugeMetricFamily(
            "keylane_backlog_messages", "Messages that wait to be delivered.", labels=_SUBSCRIPTION
        )
        pending = GaugeMetricFamily(
            "keylane_pending_messages", "Messages that consumers have leased.", labels=_SUBSCRIPTION
        )
        oldest = GaugeMetricFamily(
            "keylane_oldest_message_age_seconds", "Age of the oldest one not settled.", labels=_SUBSCRIPTION
        )
        for labels, one in _bounded_backlogs(found.subscriptions).items():
            backlog.add_metric(labels, one.waiting)
            pending.add_metric(labels, one.pending)
            oldest.add_metric(labels, max(now_ms - one.oldest_ms, 0) / 1_000 if one.oldest_ms else 0)
        yield from (backlog, pending, oldest)


def _totals(
    kinds: Iterable[_Counted], labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], Any]]
) -> Iterator[Metric]:
    counts = list(counts)
    for kind in kinds:
        family = CounterMetricFamily(kind.name, kind.what, labels=labels)
        for values, one in counts:
            family.add_metric(values, getattr(one, kind.attribute))
        yield family


def _labelled(name: str, what: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _histograms(counters: Counters) -> Iterator[Metric]:
    yield _histogram(
        "keylane_publish_seconds",
        "From a publish to its answer, of the first in each batch.",
        (),
        {(): counters.publish_seconds},
    )
    yield _histogram(
        "keylane_delivery_seconds",
        "From publish to sending to a consumer, of the first in each batch.",
        (),
        {(): counters.delivery_seconds},
    )
    yield _histogram(
        "keylane_script_seconds",
        "From calling a script to its answer.",
        ("script",),
        {(name,): one for name, one in counters.scripts.items()},
    )
    yield _histogram(
        "keylane_batch_messages",
        "Messages that are dealt with together.",
        ("operation",),
        {
            ("publish",): counters.publish_batch,
            ("deliver",): counters.delivery_batch,
            ("ack",): counters.ack_batch,
        },
    )


def _histogram(
    name: str, what: str, labels: tuple[str, ...], found: dict[tuple[str, ...], Histogram]
) -> Metric:
    family = HistogramMetricFamily(name, what, labels=labels)
    for values, one in found.items():
        buckets, passed = [], 0
        for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
            passed += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), passed))
        family.add_metric(values, buckets=buckets, sum_value=one.total)
    return family


def _bounded(counts: dict[str, int]) -> dict[str, int]:
    """Return counts by topic, those of the last ones together if there are very many."""
    names = sorted(counts)
    bounded = {name: counts[name] for name in names[:MOST_TOPICS]}
    if names[MOST_TOPICS:]:
        bounded[OTHER] = sum(counts[name] for name in names[MOST_TOPICS:])
    return bounded


def _bounded_backlogs(found: dict[tuple[str, str], Backlog]) -> dict[tuple[str, str], Backlog]:
    keys = sorted(found)
    bounded = {key: found[key] for key in keys[:MOST_SUBSCRIPTIONS]}
    for key in keys[MOST_SUBSCRIPTIONS:]:
        bounded.setdefault((OTHER, OTHER), Backlog()).add(found[key])
    return bounded
