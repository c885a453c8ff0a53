"""A consumer of a scripted worker, and a payload store in memory."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from keylane import AsyncClient, BrokerError, Consumer, Message, PayloadStore, wire
from tests.support.scripted_worker import PATIENCE, Request, ScriptedWorker


class Shelf(PayloadStore):
    """Bodies in a dict."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[str, str], bytes] = {}
        self.puts = 0
        self.gets: list[int] = []
        self.trouble: list[BrokerError] = []

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        self.puts += 1
        if self.trouble:
            raise self.trouble.pop()
        self.bodies.update({(topic, name): body for name, body in bodies})

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        self.gets.append(len(names))
        if self.trouble:
            raise self.trouble.pop()
        return [self.bodies.get((topic, name)) for name in names]

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        for name in names:
            self.bodies.pop((topic, name), None)

    async def close(self) -> None:
        raise AssertionError("a store that is not ours is not closed")


class Open:
    """Opens a consumer against the worker, and closes it."""

    def __init__(self, worker: ScriptedWorker, shelf: Shelf, **options: Any) -> None:
        self._worker = worker
        self._reply = {name: options.pop(name) for name in ("mode", "lease", "delivery") if name in options}
        self._client = AsyncClient(worker.url, payloads=shelf, timeout=options.pop("timeout", 5))
        self._options = options
        self._consumer: Consumer
        self.asked: Request

    async def __aenter__(self) -> Consumer:
        await self._client.__aenter__()
        self._consumer = self._client.subscribe("orders", "billing", mode=None, **self._options)
        opening = asyncio.create_task(self._consumer.__aenter__())
        self.asked = await self._worker.expect_subscriber(**self._reply)
        return await opening

    async def __aexit__(self, *failure: Any) -> None:
        closing = asyncio.create_task(self._consumer.__aexit__(None, None, None))
        leaving = asyncio.create_task(self._worker.expect_leaving())
        await asyncio.wait({closing}, timeout=PATIENCE)
        leaving.cancel()
        await asyncio.wait({leaving})
        closing.result()
        await self._client.__aexit__(None, None, None)


async def take(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(timeout=PATIENCE) for _ in range(count)]


def entries(messages: list[Message]) -> list[int]:
    return [int(message.id.partition("-")[2]) for message in messages]


def wire_time(worker: ScriptedWorker) -> int:
    return round(datetime.now(UTC).timestamp() * 1000) + worker.drift_ms


async def client_is_quiet(worker: ScriptedWorker) -> None:
    """Until the client has seen all that was sent: it answers a heartbeat behind it."""
    worker.link.send(wire.Heartbeat(), sequence=99)
    await worker.expect(wire.Properties)
