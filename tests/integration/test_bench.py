"""The benchmark: both sides play, and its check of order fails where order is broken."""

from contextlib import ExitStack

from keylane_broker.supervise.embedded_server import Server
from loadtest.matched import Contender, Line, Stage, measure
from loadtest.players import Order
from tests.support.running import RunningBroker

NUMBERED = Order("", batch=50, keys=20, consumers=4, numbered=True)


def test_a_line_is_played_by_both_sides_and_its_check_of_order_can_fail(broker: RunningBroker) -> None:
    assert isinstance(broker.server, Server)
    line = Line(
        "a line",
        (
            Contender("raw", NUMBERED._replace(partitions=2, body=10), raw=True),
            Contender("shared", NUMBERED),
            Contender("key-shared", NUMBERED._replace(mode="key_shared", partitions=2, body=10)),
        ),
    )
    with ExitStack() as stack:
        stage = Stage(stack, broker.url, broker.redis_url, broker.pid, broker.server.pid)
        by_hand, shared, key_shared = measure(stage, line, seconds=0.5, rounds=1)
    for result in (by_hand, shared, key_shared):
        [sample] = result.samples
        assert min(sample.rate, sample.producer, sample.redis, sample.consumer) > 0
    assert shared.samples[0].disorder > 0
    assert key_shared.samples[0].disorder == 0
