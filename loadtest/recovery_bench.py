"""Coming back: a crowd of consumers whose worker is killed.

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

from broker.config import Settings
from broker.supervisor import Running, supervise
from client import AsyncClient, Consumer, Message, OutgoingMessage
from loadtest.report import Figure, print_table

CROWD = 1_000
KEYS = 100  # that each of them holds
PARTITIONS = 1
CLIENTS = 20  # connections that the crowd shares
LATE = 120.0  # seconds to wait for anything
LEASE = 5.0  # of a partition, seconds


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


async def measure(size: int) -> list[Figure]:
    """All of it, on a broker of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(port=0, data_dir=Path(folder), log_level="warning", partition_lease=LEASE)
        async with supervise(settings) as broker:
            return await killed_worker(broker, size)


def main() -> None:
    """Print the figures."""
    print_table(uvloop.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else CROWD)))


if __name__ == "__main__":
    main()
