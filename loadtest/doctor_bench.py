"""How long the checker takes with many lanes, and for how long one of its steps holds Redis up.

.venv/bin/python -m loadtest.doctor_bench --lanes 100000
"""

import argparse
import asyncio
import time

from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Outgoing, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import single_server

TOPIC, SUBSCRIPTION = "orders", "billing"
CONSUMERS, BATCH, HOUR_MS = 100, 1_000, 3_600_000


async def fill(engine: Engine, lanes: int) -> None:
    """As many keys, each with a message that somebody holds."""
    await engine.create_topic(TOPIC, TopicSettings(partitions=1))
    await engine.create_subscription(TOPIC, SUBSCRIPTION, SubscriptionSettings("key_shared"))
    lease = await engine.acquire(TOPIC, 0, "w1", HOUR_MS)
    assert lease is not None
    rooms = [Capacity(f"c{number}", lanes // CONSUMERS + 1) for number in range(CONSUMERS)]
    for room in rooms:
        await engine.join(lease, SUBSCRIPTION, room.consumer, HOUR_MS)
    for first in range(0, lanes, BATCH):
        numbers = range(first, min(first + BATCH, lanes))
        await engine.publish(lease, [Outgoing(f"key-{n}", f"uid-{n}", pack_about(1)) for n in numbers])
    held = 0
    while held < lanes:
        fetched = await engine.fetch_flat(lease, SUBSCRIPTION, rooms)
        held += sum(fetched.found[2::3]) - sum(fetched.found[1::3]) + len(fetched.found) // 3


async def measure(lanes: int) -> None:
    """Fill a topic, look at it, and say how long that took and the longest command of it."""
    with single_server() as server:
        engine = Engine.connect(server.url)
        await fill(engine, lanes)
        await engine.store.command("CONFIG", "SET", "latency-monitor-threshold", "1")
        await engine.store.command("LATENCY", "RESET")
        began = time.perf_counter()
        problems = await check_topic(engine, TOPIC)
        took = time.perf_counter() - began
        events = await engine.store.command("LATENCY", "LATEST")
        worst = max((event[3] for event in events), default=0)
        print(f"{lanes:,} lanes: {took:.2f} s, the longest step {worst} ms, {len(problems)} problems")
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=100_000)
    asyncio.run(measure(parser.parse_args().lanes))
