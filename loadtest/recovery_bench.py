"""Coming back: a crowd of consumers whose worker is killed, and those whose neighbours are.

`python -m loadtest.recovery_bench 200` does it with a smaller crowd.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from keylane import AsyncClient, Consumer, Message, OutgoingMessage, SubscriptionBusy
from keylane_broker.config import Settings
from keylane_broker.supervise.supervisor import Running, supervise
from loadtest.report import Figure, print_table
from loadtest.victims import LATE, victims

CROWD = 1_000
KEYS = 100  # that each of them holds
PARTITIONS = 1
CLIENTS = 20  # connections that the crowd shares
LEASE = 5.0  # of a partition, seconds
SESSION = 3.0  # of a consumer that is killed, seconds
GAP_MS = 100.0  # for which the others may have to wait
OTHERS = 10


class Crowd:
    """Consumers with their hands full, and room for a few more."""

    def __init__(self, stack: AsyncExitStack, url: str, topic: str) -> None:
        self.consumers: list[Consumer] = []
        self._stack, self._url, self._topic = stack, url, topic
        self.clients: list[AsyncClient] = []

    async def gather(self, size: int) -> None:
        """Come in, and take a hundred keys each."""
        for _ in range(CLIENTS):
            self.clients.append(await self._stack.enter_async_context(AsyncClient(self._url, timeout=LATE)))
        self.consumers = [
            self.clients[number % CLIENTS].subscribe(self._topic, "s", mode="key_shared", permits=KEYS + 10)
            for number in range(size)
        ]
        await asyncio.gather(*(consumer.__aenter__() for consumer in self.consumers))
        for start in range(0, size * KEYS, 1_000):
            some = range(start, min(start + 1_000, size * KEYS))
            await self.clients[0].publish_many(
                self._topic, [OutgoingMessage(key=f"key-{number}") for number in some]
            )


async def killed_worker(broker: Running, size: int) -> list[Figure]:
    """From SIGKILL of the worker to the first delivery, and until all that was held is acked."""
    topic = "bench-recovery"
    async with AsyncExitStack() as stack:
        crowd = Crowd(stack, broker.url, topic)
        client = await stack.enter_async_context(AsyncClient(broker.url, timeout=LATE))
        await client.create_topic(topic, partitions=PARTITIONS)
        await crowd.gather(size)
        holding: list[list[Message]] = [[] for _ in crowd.consumers]
        first = asyncio.Event()
        killed = False

        async def work(number: int) -> None:
            async for message in crowd.consumers[number]:
                holding[number].append(message)
                if killed:
                    first.set()

        tasks = [asyncio.create_task(work(number)) for number in range(size)]
        async with asyncio.timeout(LATE):
            while sum(map(len, holding)) < size * KEYS:  # noqa: ASYNC110 - of many consumers
                await asyncio.sleep(0.05)
        began = time.perf_counter()
        killed = True
        os.kill(broker.workers[0].pid, signal.SIGKILL)
        fresh = [OutgoingMessage(key=f"fresh-{number}") for number in range(100)]
        publishing = asyncio.create_task(client.publish_many(topic, fresh))
        acking = [
            asyncio.create_task(consumer.ack(list(held)))
            for consumer, held in zip(crowd.consumers, holding, strict=True)
        ]
        async with asyncio.timeout(LATE):
            await first.wait()
            first_after = time.perf_counter() - began
            await publishing
            outcomes = [outcome for task in acking for outcome in await task]
            settled_after = time.perf_counter() - began
        print(f"{outcomes.count('stale')} of {len(outcomes)} acks were stale")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.delete_topic(topic)
    what = f"{size:,} consumers x {KEYS} keys after kill -9 of their worker"
    return [
        Figure(f"{what}: first delivery", first_after, LEASE + 2, 1.0, "s", at_most=True),
        Figure(f"{what}: all acked", settled_after, 10.0, 1.0, "s", at_most=True),
    ]


async def killed_neighbours(url: str, crashed: int) -> list[Figure]:
    """The longest time between deliveries to others, from SIGKILL of many consumers until these have all."""
    topic = "bench-crash"
    fresh: list[float] = []  # when messages came that were published meanwhile
    back: list[float] = []  # and those that the others had held

    done: dict[Consumer, list[Message]] = {}

    async def work(consumer: Consumer) -> None:
        async for message in consumer:
            (back if str(message.key).startswith("key") else fresh).append(time.perf_counter())
            done.setdefault(consumer, []).append(message)

    async def settle() -> None:
        """Beside it, so that what comes is seen when it comes."""
        while True:
            for consumer, messages in list(done.items()):
                del done[consumer]
                for start in range(0, len(messages), 500):
                    await consumer.ack(messages[start : start + 500])
            await asyncio.sleep(0.005)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(url, timeout=LATE))
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s", mode="key_shared")
        for start in range(0, crashed * KEYS, 1_000):
            some = range(start, min(start + 1_000, crashed * KEYS))
            await client.publish_many(topic, [OutgoingMessage(key=f"key-{number}") for number in some])
        async with victims(url, topic, "key_shared", crashed, KEYS) as process:
            consumers = [client.subscribe(topic, "s", mode="key_shared") for _ in range(OTHERS)]
            await asyncio.gather(*map(stack.enter_async_context, consumers))
            tasks = [asyncio.create_task(work(one)) for one in consumers]
            tasks.append(asyncio.create_task(settle()))
            number, killed = 0, 0.0
            async with asyncio.timeout(LATE):
                while len(back) < crashed * KEYS:
                    await client.publish(topic, key=f"fresh-{number}")
                    number += 1
                    if number == 100:
                        killed = time.perf_counter()
                        process.kill()
                    await asyncio.sleep(0.002)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await client.delete_topic(topic)
    what = f"crash of {crashed} consumers x {KEYS} keys: longest gap between"
    return [
        Figure(f"{what} {kind}", _longest_gap(times, killed), GAP_MS, 1.0, "ms", at_most=True)
        for kind, times in (
            ("deliveries to others", sorted(fresh + back)),
            ("those of fresh messages", fresh),
        )
    ]


def _longest_gap(times: list[float], since: float) -> float:
    """In ms, between the first of them at or before an instant and the last."""
    late = [at for at in times if at >= since]
    before = [at for at in times if at < since][-1:]
    return max(after - at for at, after in zip([*before, *late], late, strict=False)) * 1_000


async def successor(broker: Running, *, change: bool) -> float:
    """Seconds from SIGKILL of an exclusive consumer, and perhaps of its worker, until another is in."""
    topic = f"bench-successor-{int(change)}"
    async with AsyncClient(broker.url, timeout=LATE) as client, asyncio.timeout(LATE):
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s", mode="exclusive")
        await client.publish(topic)
        async with victims(broker.url, topic, "exclusive", 1, 1) as process:
            began = time.perf_counter()
            process.kill()
            if change:
                await asyncio.sleep(SESSION / 6)
                os.kill(broker.workers[0].pid, signal.SIGKILL)
            while True:
                try:
                    async with client.subscribe(topic, "s", mode="exclusive") as consumer:
                        took = time.perf_counter() - began
                        message = await consumer.receive(LATE)
                        await message.ack()
                        break
                except SubscriptionBusy:
                    await asyncio.sleep(0.01)
        await client.delete_topic(topic)
    return took


async def measure(size: int) -> list[Figure]:
    """All of it, on brokers of their own."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(port=0, data_dir=Path(folder), log_level="warning", partition_lease=LEASE)
        async with supervise(settings) as broker:
            figures += await killed_worker(broker, size)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            port=0,
            data_dir=Path(folder),
            log_level="warning",
            session=SESSION,
            partition_lease=SESSION / 2,
            heartbeat=1.0,
        )
        async with supervise(settings) as broker:
            figures += await killed_neighbours(broker.url, size // 2)
            for change, what in ((False, ""), (True, " and its worker")):
                took = await successor(broker, change=change)
                title = f"exclusive: the successor is in after kill -9 of the consumer{what}"
                figures.append(Figure(title, took, SESSION + 1, 1.0, "s", at_most=True))
    return figures


def main() -> None:
    """Print the figures."""
    print_table(uvloop.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else CROWD)))


if __name__ == "__main__":
    main()
