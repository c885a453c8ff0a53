"""Consumes until somebody kills it: reads each body, then acks. Arguments are URL, topic and subscription."""

import asyncio
import sys

from keylane import AsyncClient
from keylane.errors import PayloadMissing


async def take(url: str, topic: str, subscription: str) -> None:
    """Consume, and say whose body is not there."""
    async with (
        AsyncClient(url) as client,
        client.subscribe(topic, subscription, mode=None, permits=200) as consumer,
    ):
        async for batch in consumer.batches(50):
            missing = set()
            for message in batch:
                try:
                    await message.data()
                except PayloadMissing:
                    missing.add(message)
            for message, outcome in zip(batch, await consumer.ack(batch), strict=True):
                if message in missing and outcome == "settled":  # else another has acked it meanwhile
                    print(f"{message} had no body", flush=True)


if __name__ == "__main__":
    asyncio.run(take(*sys.argv[1:]))
