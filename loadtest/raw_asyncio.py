"""The baseline for latency: Redis Streams by hand in a program that awaits, as those of our client do.

One connection reads and settles; messages are published at a steady pace, each in a task of its own.
"""

import asyncio
import time
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from redis.asyncio import Redis

from loadtest.players import Order, Tally, keep_pace
from loadtest.raw import stream_of, streams


def produce(pipe: Connection, url: str) -> None:
    """XADD at a steady pace."""
    uvloop.run(_produce(pipe, url))


async def _produce(pipe: Connection, url: str) -> None:
    async with aclosing(Redis.from_url(url)) as redis:
        await redis.ping()
        pipe.send("ready")
        while order := await asyncio.to_thread(pipe.recv):
            tally = Tally(order.messages)
            await _add_at(redis, order)
            pipe.send(tally.report())


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
        async with aclosing(Redis.from_url(url, single_connection_client=True)) as redis:
            names, group = streams(order), order.subscription_of(0)
            for name in names:
                await redis.xgroup_create(name, group, "0", mkstream=True)
            pipe.send("listening")
            tally = Tally(order.deliveries)
            while not await _take(redis, order, names, group, tally):
                pass
            pipe.send(tally.report())
            await redis.delete(*names)


async def _take(redis: Any, order: Order, names: list[str], group: str, tally: Tally) -> bool:
    """Take what is there; answers whether that was the last."""
    read = await redis.xreadgroup(group, "c", dict.fromkeys(names, ">"), count=order.taken, block=60_000)
    now = time.monotonic()
    tally.latencies += [now - float(fields[b"sent"]) for _, some in read for _, fields in some]
    pipeline = redis.pipeline(transaction=False)
    for name, entries in read:
        ids = [id for id, _ in entries]
        pipeline.xack(name, group, *ids)
        pipeline.xdel(name, *ids)
    await pipeline.execute()
    return tally.count(sum(len(entries) for _, entries in read))
