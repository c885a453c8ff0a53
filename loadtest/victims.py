"""Consumers that take what they are given and wait to be killed, in a process of their own.

async with victims(url, "orders", "key_shared", count=500, each=100) as process:
    process.kill()
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop

from keylane import AsyncClient, Consumer
from keylane.types import Mode

LATE = 120.0  # seconds to wait for anything
_CLIENTS = 20  # connections that they share
_ROOT = Path(__file__).resolve().parent.parent


@asynccontextmanager
async def victims(
    url: str, topic: str, mode: Mode, count: int, each: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Some consumers, once they have as many messages as they may hold."""
    order = json.dumps([url, topic, mode, count, each])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.victims", order, stdout=asyncio.subprocess.PIPE, cwd=_ROOT
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LATE):
            assert await process.stdout.readline() == b"full\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _take(consumer: Consumer, count: int) -> None:
    for _ in range(count):
        await consumer.receive(LATE)


async def _main(url: str, topic: str, mode: Mode, count: int, each: int) -> None:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(url, timeout=LATE))
            for _ in range(min(_CLIENTS, count))
        ]
        consumers = [
            clients[number % len(clients)].subscribe(topic, "s", mode=mode, permits=each)
            for number in range(count)
        ]
        await asyncio.gather(*map(stack.enter_async_context, consumers))
        await asyncio.gather(*(_take(consumer, each) for consumer in consumers))
        print("full", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    uvloop.run(_main(*json.loads(sys.argv[1])))
