"""What one message costs Redis: bytes while it waits and after its last ack, and microseconds of CPU."""

import statistics
import time

import uvloop

from keylane import AsyncClient, OutgoingMessage
from loadtest.matched import Contender, Stage, cpu_of
from loadtest.players import Order
from loadtest.report import Figure

PARTITIONS = 64
KEY = "customer-0000001"
QUEUED = 100_000
QUEUED_BYTES, LEFT_BYTES = 95, 1.0  # the bars; less than one byte is nothing
TIMES = 6.0  # as long as by hand


def memory(stage: Stage, seconds: float, rounds: int, count: int = QUEUED) -> list[Figure]:
    """Bytes for a message with a 16-byte key and a generated uid, in a key-shared subscription."""
    order = Order("bench-memory", count, batch=500, mode="key_shared")
    producer, consumer = stage.players["ours"]
    with stage.topics((Contender("", order),)):
        stage.play(Contender("", order._replace(messages=1_000)))  # what a topic has once, it has from now on
        empty = _used_memory(stage)
        producer.tell(order)
        producer.report()
        queued = _used_memory(stage)
        consumer.tell(order)
        consumer.expect("listening")
        consumer.report()
        left = _used_memory(stage)
    return [
        Figure(
            "memory of a queued message", (queued - empty) / count, QUEUED_BYTES, 1.0, "bytes", at_most=True
        ),
        Figure("memory after its last ack", (left - empty) / count, LEFT_BYTES, 1.0, "bytes", at_most=True),
    ]


def _used_memory(stage: Stage) -> int:
    """What the data take, once Redis has freed what was deleted."""
    while True:
        info = stage.redis.info("memory")
        if info["lazyfree_pending_objects"] == 0:
            return int(info["used_memory"] - info["mem_clients_normal"] - info["mem_aof_buffer"])
        time.sleep(0.01)


def one_message(stage: Stage, seconds: float, rounds: int) -> list[Figure]:
    """CPU of Redis for publish, fetch and ack of a message by itself in one of 64 partitions.

    There is one in each partition, and the next ones are published when all have been acked.
    """
    ours, by_hand = [], []
    stage.client.create_topic("bench-one", partitions=PARTITIONS)
    for number in range(rounds + 1):
        spent, times = uvloop.run(_one_each(stage, seconds / rounds))
        if number:
            ours.append(spent)
            by_hand.append(_by_hand(stage, times))
    stage.client.delete_topic("bench-one")
    ratios = [mine / theirs for mine, theirs in zip(ours, by_hand, strict=True)]
    return [
        Figure(
            f"CPU of Redis for one message, {PARTITIONS} partitions, against by hand",
            statistics.median(ours),
            statistics.median(by_hand),
            TIMES,
            "us",
            at_most=True,
            spread=(min(ratios), max(ratios)),
        )
    ]


async def _one_each(stage: Stage, seconds: float) -> tuple[float, int]:
    """Publish, receive and ack one message in each partition, again and again; answers how often, too."""
    messages = [OutgoingMessage(key=KEY, partition=number) for number in range(PARTITIONS)]
    async with AsyncClient(stage.url) as client, client.subscribe("bench-one", "s") as consumer:
        before, end, times = cpu_of(stage.server), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            await client.publish_many("bench-one", messages)
            times, left = times + 1, PARTITIONS
            async for batch in consumer.batches():
                await consumer.ack(batch)
                left -= len(batch)
                if not left:
                    break
        return (cpu_of(stage.server) - before) / times / PARTITIONS * 1e6, times


def _by_hand(stage: Stage, rounds: int) -> float:
    """XADD, XREADGROUP, XACK and XDEL of one entry, each stream in turn."""
    redis, names = stage.redis, [f"raw:one:{number}" for number in range(PARTITIONS)]
    for name in names:
        redis.xgroup_create(name, "s", "0", mkstream=True)
    before = cpu_of(stage.server)
    for number in range(1, rounds + 1):
        pipeline, id = redis.pipeline(transaction=False), f"{number}-0"
        for name in names:
            pipeline.xadd(name, {"key": KEY}, id=id)
            pipeline.xreadgroup("s", "c", {name: ">"}, count=1)
            pipeline.xack(name, "s", id)
            pipeline.xdel(name, id)
        pipeline.execute()
    spent = cpu_of(stage.server) - before
    redis.delete(*names)
    return spent / rounds / len(names) * 1e6
