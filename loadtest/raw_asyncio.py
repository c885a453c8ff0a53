"""The baseline in a program that awaits, as those of our client do: Redis Streams through redis.asyncio.

What threads do in loadtest.raw is done here by tasks, each with a connection of its own; at a steady pace,
each message is published by a task of its own, over one pool of connections.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from loadtest.players import Order, Report, Tally, keep_pace
from loadtest.raw import stream_of, streams


def produce(pipe: Connection, url: str) -> None:
    """XADD, pipelined by the batch, or at a steady pace."""
    uvloop.run(_produce(pipe, url))


async def _produce(pipe: Connection, url: str) -> None:
    async with aclosing(Redis.from_url(url)) as redis:
        await redis.ping()
        pipe.send("ready")
        while order := await asyncio.to_thread(pipe.recv):
            async with AsyncExitStack() as stack:
                calls = 0 if order.rate else order.calls
                connections = [await _connect(stack, url) for _ in range(calls)]
                tally, portions = Tally(order.messages), order.portions()
                if order.rate:
                    await _add_at(redis, order)
                else:
                    added = (_add(one, order, portions, call) for call, one in enumerate(connections))
                    await asyncio.gather(*added)
                pipe.send(tally.report())


async def _connect(stack: AsyncExitStack, url: str) -> Any:
    redis = await stack.enter_async_context(aclosing(Redis.from_url(url, single_connection_client=True)))
    await redis.ping()
    return redis


async def _add(redis: Any, order: Order, portions: Iterator[int], call: int) -> None:
    names, keys = streams(order), order.keys_of(call)
    body = {"body": b"x" * order.body} if order.body else {}
    for count in portions:
        if count == 1:
            key = next(keys)
            await redis.xadd(stream_of(key, names), {"key": key, **body})
            continue
        pipeline = redis.pipeline(transaction=False)
        for _ in range(count):
            key = next(keys)
            pipeline.xadd(stream_of(key, names), {"key": key, **body})
        await pipeline.execute()


async def _add_at(redis: Any, order: Order) -> None:
    names, keys = streams(order), order.keys_of(0)
    body = {"body": b"x" * order.body} if order.body else {}

    async def add() -> None:
        key = next(keys)
        await redis.xadd(stream_of(key, names), {"key": key, "sent": repr(time.monotonic()), **body})

    await keep_pace(order, add)


def consume(pipe: Connection, url: str) -> None:
    """XREADGROUP, then XACK and XDEL, pipelined."""
    uvloop.run(_consume(pipe, url))


async def _consume(pipe: Connection, url: str) -> None:
    pipe.send("ready")
    while order := await asyncio.to_thread(pipe.recv):
        async with AsyncExitStack() as stack:
            redis, names, group = await _connect(stack, url), streams(order), order.subscription_of(0)
            for name in names:
                await redis.xgroup_create(name, group, "0", mkstream=True)
            takers = _Takers(redis, order, names, group)
            connections = [await _connect(stack, url) for _ in range(order.consumers)]
            pipe.send("listening")
            await asyncio.gather(*(takers.take(one, f"c{at}") for at, one in enumerate(connections)))
            pipe.send(takers.report)


class _Takers:
    """The consumers of a group."""

    def __init__(self, redis: Any, order: Order, names: list[str], group: str) -> None:
        self.report: Report | None = None
        self._redis, self._order, self._names, self._group = redis, order, names, group
        self._tally = Tally(order.deliveries)

    async def take(self, redis: Any, consumer: str) -> None:
        """Take messages until all are taken."""
        wanted, group = dict.fromkeys(self._names, ">"), self._group
        while self.report is None:
            try:
                read = await redis.xreadgroup(group, consumer, wanted, count=self._order.taken, block=60_000)
            except ResponseError:
                if self.report is None:
                    raise
                return  # the streams are gone: all is done
            if self._order.rate:
                now, sent = time.monotonic(), [fields[b"sent"] for _, some in read for _, fields in some]
                self._tally.latencies += [now - float(at) for at in sent]
            pipeline = redis.pipeline(transaction=False)
            for name, entries in read:
                ids = [id for id, _ in entries]
                pipeline.xack(name, group, *ids)
                pipeline.xdel(name, *ids)
            await pipeline.execute()
            if read and self._tally.count(sum(len(entries) for _, entries in read)):
                self.report = self._tally.report()
                await self._redis.delete(*self._names)  # which ends those who wait for more
