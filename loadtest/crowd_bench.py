"""What many consumers and hot keys cost the others: `python -m loadtest.crowd_bench`.

Latencies are of one publish after the other, from the call of publish() to the message in the application.
"""

import asyncio
import statistics
import time
from contextlib import AsyncExitStack

import uvloop

from keylane import AsyncClient, Consumer, OutgoingMessage
from keylane.types import Mode
from loadtest.report import Figure, print_table

MESSAGES = 400
IDLE = 300
HOT = 100_000


async def crowd(url: str, idle: int = IDLE) -> list[Figure]:
    """Milliseconds to a busy key's consumer, alone and beside consumers that have nothing to do."""
    figures = []
    modes: list[Mode] = ["shared", "key_shared"]
    for mode in modes:
        alone = await _latency(url, f"bench-alone-{mode}", mode, 0)
        crowded = await _latency(url, f"bench-crowd-{mode}", mode, idle)
        title = f"{mode}: p50 beside {idle} idle consumers, against alone"
        figures.append(Figure(title, crowded, alone, 1.2, "ms", at_most=True))
    return figures


async def _latency(url: str, topic: str, mode: Mode, idle: int) -> float:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(url))
        await client.create_topic(topic, partitions=1)
        sent: dict[str, float] = {}
        took: list[float] = []
        arrived = asyncio.Event()

        async def take(consumer: Consumer) -> None:
            async for message in consumer:
                took.append(time.perf_counter() - sent["at"])
                await message.ack()
                arrived.set()

        async with asyncio.TaskGroup() as tasks:
            others = [
                stack.enter_async_context(_Joined(url, topic, mode, idle // 10))
                for _ in range(10 if idle else 0)
            ]
            found = [one for part in await asyncio.gather(*others) for one in part]
            found += await stack.enter_async_context(_Joined(url, topic, mode, 1))
            consuming = [tasks.create_task(take(one)) for one in found]
            for _ in range(MESSAGES):
                arrived.clear()
                sent["at"] = time.perf_counter()
                await client.publish(topic, key="busy")
                await arrived.wait()
            for task in consuming:
                task.cancel()
        await client.delete_topic(topic)
    return statistics.median(took[MESSAGES // 10 :]) * 1_000


class _Joined:
    """Some consumers on a connection of their own."""

    def __init__(self, url: str, topic: str, mode: Mode, count: int) -> None:
        self._url, self._topic, self._mode, self._count = url, topic, mode, count
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> list[Consumer]:
        client = await self._stack.enter_async_context(AsyncClient(self._url))
        return [
            await self._stack.enter_async_context(client.subscribe(self._topic, "s", mode=self._mode))
            for _ in range(self._count)
        ]

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


async def hot_key(url: str, hot: int = HOT) -> list[Figure]:
    """Milliseconds that another key waits behind many messages of one whose consumer is full."""
    topic = "bench-hot"
    async with AsyncClient(url) as client, AsyncClient(url) as other:
        await client.create_topic(topic, partitions=1)
        async with (
            client.subscribe(topic, "s", mode="key_shared", permits=10) as full,
            other.subscribe(topic, "s", mode="key_shared", permits=10) as free,
        ):
            await client.publish_many(topic, [OutgoingMessage(key="hot")])
            taken = [full, free]
            waiting = [asyncio.ensure_future(one.receive()) for one in taken]
            done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            holder = taken[waiting.index(done.pop())]
            idle = full if holder is free else free

            async def longest() -> float:
                """While the hot key comes in, another message of another key again and again."""
                worst = 0.0
                for number in range(hot // 1_000):
                    await client.publish_many(topic, [OutgoingMessage(key="hot") for _ in range(1_000)])
                    began = time.perf_counter()
                    await client.publish(topic, key=f"other-{number}")
                    message = await idle.receive()
                    worst = max(worst, time.perf_counter() - began)
                    await message.ack()
                return worst

            async def behind(*, known: bool) -> float:
                """Nobody has room while it all comes in; then somebody has."""
                await idle.pause()
                for _ in range(hot // 1_000):
                    await client.publish_many(topic, [OutgoingMessage(key="hot") for _ in range(1_000)])
                await client.publish(topic, key="other")
                if not known:
                    await _displace(client)
                began = time.perf_counter()
                await idle.resume()
                message = await idle.receive()
                took = time.perf_counter() - began
                await message.ack()
                return took

            steady = await longest()
            at_once, unknown = await behind(known=True), await behind(known=False)
        await client.delete_topic(topic)
    return [
        Figure(
            f"another key beside {hot:,} of a hot one, as they come",
            steady * 1_000,
            50,
            1.0,
            "ms",
            at_most=True,
        ),
        Figure(
            f"another key behind {hot:,} of a hot one, all at once",
            at_once * 1_000,
            50,
            1.0,
            "ms",
            at_most=True,
        ),
        Figure(
            "the same where the worker does not know their keys",
            unknown * 1_000,
            50,
            1.0,
            "ms",
            at_most=True,
        ),
    ]


async def _displace(client: AsyncClient) -> None:
    """Have the worker forget what it remembers of other topics."""
    topic, padding = "bench-displace", {"padding": "x" * 900}
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    for _ in range(20):
        await client.publish_many(topic, [OutgoingMessage(attributes=padding) for _ in range(1_000)])
    await client.delete_topic(topic)


async def _run(url: str) -> list[Figure]:
    return [*await crowd(url), *await hot_key(url)]


def run(url: str) -> list[Figure]:
    """All of them, on a running broker."""
    return uvloop.run(_run(url))


if __name__ == "__main__":
    from loadtest.bench import running_broker

    with running_broker() as broker:
        print_table(run(broker.url))
