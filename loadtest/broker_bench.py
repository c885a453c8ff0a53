"""Workloads through the whole product: producer, worker, server and consumer are processes of their own."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from loadtest.players import (
    Order,
    Player,
    consume,
    consume_by_hand,
    play,
    produce,
    produce_by_hand,
)
from loadtest.report import Figure

ROUNDS = 7

Topic = Callable[
    [str], AbstractContextManager[None]
]  # makes a topic, and deletes it with the stream beside it


def by_hand(name: str) -> str:
    """The stream that stands beside a topic."""
    return f"raw-{name}"


class Stage:
    """Warm processes of both kinds on one server, that take turns."""

    def __init__(self, stack: ExitStack, url: str, redis_url: str, consumers: int = 1) -> None:
        self.ours = (
            stack.enter_context(Player(produce, url)),
            [stack.enter_context(Player(consume, url)) for _ in range(consumers)],
        )
        self.by_hand = (
            stack.enter_context(Player(produce_by_hand, redis_url)),
            [stack.enter_context(Player(consume_by_hand, redis_url)) for _ in range(consumers)],
        )

    def rounds(
        self, topic: Topic, order: Order, rounds: int = ROUNDS
    ) -> tuple[list[float], list[float], list[float], list[float]]:
        """Seconds of ours and by hand, then the latencies; rounds in turn, the first to warm up."""
        ours, hand, our_latencies, hand_latencies = [], [], list[float](), list[float]()
        for number in range(rounds + 1):
            name = f"{order.name}-{number}"
            with topic(name):
                took, latencies = play(*self.ours, order._replace(name=name))
                raw_took, raw_latencies = play(*self.by_hand, order._replace(name=by_hand(name)))
            if number:
                ours.append(took)
                hand.append(raw_took)
                our_latencies += latencies
                hand_latencies += raw_latencies
        return ours, hand, our_latencies, hand_latencies


def throughput(stage: Stage, topic: Topic, count: int = 100_000) -> list[Figure]:
    """Messages a second from the first publish to the last ack."""
    figures = []
    for title, bar, order in (
        ("end to end, metadata only", 2.0, Order("bench-meta", "s0", count)),
        ("end to end, bodies of 100 bytes", 1.0, Order("bench-body", "s0", count, b"x" * 100)),
        ("end to end, key-shared, metadata only", 1.0, Order("bench-keys", "s0", count, mode="key_shared")),
    ):
        ours, hand, _, _ = stage.rounds(topic, order)
        figures.append(
            Figure(title, count / statistics.median(ours), count / statistics.median(hand), bar, "messages/s")
        )
    return figures


def fan_out(stage: Stage, topic: Topic, count: int = 20_000) -> list[Figure]:
    """Deliveries a second to five subscriptions, a consumer process each."""
    consumers = len(stage.ours[1])
    ours, hand, _, _ = stage.rounds(topic, Order("bench-fan", "s0", count, alone=False))
    total = count * consumers
    title = f"fan-out of {count:,} messages to {consumers} subscriptions"
    return [
        Figure(title, total / statistics.median(ours), total / statistics.median(hand), 1.0, "deliveries/s")
    ]


def latency(stage: Stage, topic: Topic, rate: float = 500, seconds: int = 2) -> list[Figure]:
    """Milliseconds from publish to delivery at a steady pace."""
    order = Order("bench-latency", "s0", int(rate * seconds), rate=rate)
    _, _, ours, hand = stage.rounds(topic, order)
    figures = []
    for percent, bar in ((50, 2.0), (99, 3.0)):
        our_ms, hand_ms = (statistics.quantiles(part, n=100)[percent - 1] * 1_000 for part in (ours, hand))
        title = f"latency p{percent} at {rate:g} messages/s"
        figures.append(Figure(title, our_ms, hand_ms, bar, "ms", at_most=True))
    return figures
