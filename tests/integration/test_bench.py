"""The benchmark: both sides play, and its check of order fails where order is broken."""

from contextlib import ExitStack

import pytest

from keylane_broker.supervise.embedded_server import Server
from loadtest.matched import Contender, Line, Stage, measure
from loadtest.players import Order
from tests.support.running import RunningBroker

NUMBERED = Order("", batch=50, keys=20, consumers=4, numbered=True)


@pytest.mark.slow
def test_a_line_is_played_by_both_sides_and_its_check_of_order_can_fail(
    broker: RunningBroker, topic: str
) -> None:
    assert isinstance(broker.server, Server)
    two = NUMBERED._replace(partitions=2, body=10)
    by_hand = Contender("raw", two, "raw")
    key_shared = Contender("key-shared", two._replace(mode="key_shared"))
    shared = Contender("shared", NUMBERED._replace(name=topic, messages=1_000))
    with ExitStack() as stack:
        stage = Stage(stack, broker.url, broker.redis_url, broker.pid, broker.server.pid)
        results = measure(stage, Line("a line", (by_hand, key_shared)), seconds=0.3, rounds=1)
        with stage.topics((shared,)):
            while not stage.play(shared).disorder:
                pass  # by chance nobody was overtaken
    for result in results:
        [sample] = result.samples
        assert min(sample.rate, sample.producer, sample.redis, sample.consumer) > 0
        assert sample.disorder == 0
