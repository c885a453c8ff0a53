"""The lines of the benchmark: which workloads are measured, and the bars that are set for them."""

from collections.abc import Mapping
from typing import NamedTuple

from loadtest.matched import Contender, Line
from loadtest.players import Order
from loadtest.report import Figure
from loadtest.results import Result

BODY = 100  # bytes
RAW, RAW_BODY, SHARED, BODIES, KEYS = "raw", "raw, body", "shared", "shared, body", "key-shared"
AWAITED, AWAITED_BODY = "raw, asyncio", "raw, asyncio, body"
INLINE = "shared, body inline"
IDLE = 300
ORDER = "order of 20 keys"
PACE = 500.0  # messages a second where latency is measured


def _throughput(name: str, order: Order) -> Line:
    """A workload by hand, with threads and with tasks, and in three ways of ours."""
    keys = order._replace(mode="key_shared", consumers=max(order.consumers, 4))
    return Line(
        name,
        (
            Contender(RAW, order, "raw"),
            Contender(AWAITED, order, "raw, asyncio"),
            Contender(SHARED, order),
            Contender(KEYS, keys),
            Contender(RAW_BODY, order._replace(body=BODY), "raw"),
            Contender(AWAITED_BODY, order._replace(body=BODY), "raw, asyncio"),
            Contender(BODIES, order._replace(body=BODY)),
            Contender(INLINE, order._replace(body=BODY, inline=BODY)),
        ),
    )


def _latency(name: str, order: Order) -> Line:
    order = order._replace(rate=PACE, calls=1)
    return Line(
        name,
        (
            Contender(RAW, order, "raw"),
            Contender(AWAITED, order, "raw, asyncio"),
            Contender(SHARED, order),
            Contender(RAW_BODY, order._replace(body=BODY), "raw"),
            Contender(AWAITED_BODY, order._replace(body=BODY), "raw, asyncio"),
            Contender(BODIES, order._replace(body=BODY)),
            Contender(INLINE, order._replace(body=BODY, inline=BODY)),
        ),
    )


def _some(count: int) -> str:
    return f"{count} partition{'s' if count > 1 else ''}"


MANY = Order("", partitions=8, consumers=200)
FAN_OUT = Order("", subscriptions=5, consumers=5)
FAN_OUT_SINGLES = FAN_OUT._replace(partitions=8, batch=1, calls=50)
LOOP = Order("", batch=500, taken=500, body=BODY)
LOOP_KEYS = LOOP._replace(mode="key_shared", consumers=4)
BUSY = Order("", keys=1, calls=1, rate=PACE)
BUSY_KEY = BUSY._replace(mode="key_shared")
NUMBERED = Order("", keys=20, mode="key_shared", consumers=4, numbered=True)

LINES = [
    *(
        _throughput(
            f"{_some(partitions)}, batch {batch}",
            Order("", partitions=partitions, batch=batch, taken=max(batch, 100)),
        )
        for partitions in (1, 8, 64)
        for batch in (1, 10, 100, 500)
    ),
    *(
        _throughput(
            f"{_some(partitions)}, singles from 50 tasks", Order("", partitions=partitions, batch=1, calls=50)
        )
        for partitions in (1, 8, 64)
    ),
    _throughput("8 partitions, batch 100, 200 consumers", MANY),
    Line(
        "5 subscriptions, batch 100, deliveries",
        (Contender(RAW, FAN_OUT, "raw"), Contender(SHARED, FAN_OUT)),
    ),
    Line(
        "5 subscriptions, 8 partitions, singles from 50 tasks, deliveries",
        (Contender(RAW, FAN_OUT_SINGLES, "raw"), Contender(SHARED, FAN_OUT_SINGLES)),
    ),
    Line(
        "README's loop, batch 500",
        (
            Contender("batches and ack", LOOP),
            Contender("README's loop", LOOP._replace(loop="messages")),
            Contender("batches and ack, key-shared", LOOP_KEYS),
            Contender("README's loop, key-shared", LOOP_KEYS._replace(loop="messages")),
        ),
    ),
    _latency("latency at 500/s, 1 partition", Order("")),
    _latency("latency at 500/s, 64 partitions", Order("", partitions=64)),
    Line(
        "latency beside 300 idle consumers",
        (
            Contender("alone", BUSY),
            Contender("300 idle", BUSY._replace(consumers=IDLE + 1)),
            Contender("alone, key-shared", BUSY_KEY),
            Contender("300 idle, key-shared", BUSY_KEY._replace(consumers=IDLE + 1)),
        ),
    ),
    Line(
        ORDER,
        (Contender(KEYS, NUMBERED), Contender("key-shared, 8 partitions", NUMBERED._replace(partitions=8))),
    ),
]


class Bar(NamedTuple):
    """What the ratio of two contenders of a line should be."""

    line: str
    ours: str
    baseline: str
    bar: float
    aim: float | None = None
    what: str = "rate"


BARS = [
    *(
        bar
        for raw, raw_body in ((AWAITED, AWAITED_BODY), (RAW, RAW_BODY))
        for bar in (
            Bar("1 partition, batch 100", SHARED, raw, 1.5),
            Bar("1 partition, batch 100", BODIES, raw_body, 1.0),
            Bar("8 partitions, batch 100", SHARED, raw, 1.0),
            Bar("64 partitions, batch 100", SHARED, raw, 0.4, 0.7),
            Bar("64 partitions, singles from 50 tasks", SHARED, raw, 0.5, 0.8),
        )
    ),
    Bar("1 partition, batch 500", KEYS, SHARED, 0.7),
    Bar("5 subscriptions, batch 100, deliveries", SHARED, RAW, 1.0),
    Bar("README's loop, batch 500", "README's loop", "batches and ack", 0.85),
    Bar("README's loop, batch 500", "README's loop, key-shared", "batches and ack, key-shared", 0.85),
    Bar("latency at 500/s, 1 partition", SHARED, AWAITED, 1.8, what="p50"),
    Bar("latency at 500/s, 1 partition", BODIES, AWAITED_BODY, 3.0, what="p50"),
    Bar("latency at 500/s, 1 partition", SHARED, AWAITED, 2.5, what="p99"),
    Bar("latency at 500/s, 1 partition", BODIES, AWAITED_BODY, 4.0, what="p99"),
    Bar("latency beside 300 idle consumers", "300 idle", "alone", 1.2, what="p50"),
    Bar("latency beside 300 idle consumers", "300 idle, key-shared", "alone, key-shared", 1.2, what="p50"),
]


def figures_of(results: list[Result]) -> list[Figure]:
    """What was found against the bars, where both contenders have played."""
    known: Mapping[tuple[str, str], Result] = {(result.line, result.contender): result for result in results}
    found = [
        Figure(
            f"{result.line}: out of order, {result.contender}",
            sum(result.each("disorder")),
            1,
            0,
            "messages",
            True,
        )
        for result in results
        if result.line == ORDER
    ]
    for bar in BARS:
        ours, baseline = known.get((bar.line, bar.ours)), known.get((bar.line, bar.baseline))
        if ours and baseline:
            found.append(_figure(bar, ours, baseline))
    return found


def _figure(bar: Bar, ours: Result, baseline: Result) -> Figure:
    """The ratio of medians, and the lowest and highest of the rounds that were played together."""
    pairs = zip(ours.each(bar.what), baseline.each(bar.what), strict=False)
    ratios = [mine / theirs for mine, theirs in pairs]
    return Figure(
        f"{bar.line}{'' if bar.what == 'rate' else f', {bar.what}'}: {bar.ours} against {bar.baseline}",
        ours.median(bar.what),
        baseline.median(bar.what),
        bar.bar,
        "messages/s" if bar.what == "rate" else "ms",
        at_most=bar.what != "rate",
        aim=bar.aim,
        spread=(min(ratios), max(ratios)),
    )
