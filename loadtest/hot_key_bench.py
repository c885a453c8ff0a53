"""What a hot key costs the others: `python -m loadtest.hot_key_bench`."""

import asyncio
import time

import uvloop

from keylane import AsyncClient, OutgoingMessage
from loadtest.matched import running_broker
from loadtest.report import Figure, print_table

HOT = 100_000


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


def run() -> list[Figure]:
    """On a broker of its own."""
    with running_broker() as broker:
        return uvloop.run(hot_key(broker.url))


if __name__ == "__main__":
    print_table(run())
