"""The baseline: Redis Streams by hand, through redis-py with hiredis, tuned as our side is.

As many streams as partitions, a key's messages in one of them; XADD pipelined by the batch, each of the calls
under way on a connection of its own; XREADGROUP COUNT by the batch from all streams; XACK and XDEL of what
was read, pipelined, a stream's ids together. It deletes, as we do, what has been acked.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any
from zlib import crc32

from redis import Redis
from redis.exceptions import ResponseError

from loadtest.players import Order, Report, Tally


def streams(order: Order) -> list[str]:
    """The streams that stand for the partitions of a topic."""
    return [f"raw:{order.name}:{number}" for number in range(order.partitions)]


def produce(pipe: Connection, url: str) -> None:
    """XADD, pipelined."""
    pipe.send("ready")
    while order := pipe.recv():
        with ExitStack() as stack:
            connections = [stack.enter_context(_connect(url)) for _ in range(order.calls)]
            tally = Tally(order.messages)
            if order.rate:
                _add_at(connections[0], order)
            else:
                portions = _Shared(order.portions())
                for thread in _start(
                    [(_add, one, order, portions, call) for call, one in enumerate(connections)]
                ):
                    thread.join()
            pipe.send(tally.report())


def consume(pipe: Connection, url: str) -> None:
    """XREADGROUP, then XACK and XDEL, pipelined."""
    pipe.send("ready")
    while order := pipe.recv():
        with ExitStack() as stack:
            takers = _Takers(stack, url, order)
            pipe.send("listening")
            pipe.send(takers.finish())


class _Takers:
    """The consumers of a group."""

    def __init__(self, stack: ExitStack, url: str, order: Order) -> None:
        self._order, self._names = order, streams(order)
        self._redis = stack.enter_context(_connect(url))
        for name in self._names:
            for number in range(order.subscriptions):
                self._redis.xgroup_create(name, order.subscription_of(number), "0", mkstream=True)
        connections = [stack.enter_context(_connect(url)) for _ in range(order.consumers)]
        self._lock, self._tally = threading.Lock(), Tally(order.deliveries)
        self._report: Report | None = None
        self._threads = _start([(self._take, one, number) for number, one in enumerate(connections)])

    def finish(self) -> Report:
        """Wait until all messages of a round are taken, and the streams deleted."""
        for thread in self._threads:
            thread.join()
        assert self._report is not None
        return self._report

    def _take(self, redis: Any, number: int) -> None:
        group, consumer = self._order.subscription_of(number), f"c{number}"
        wanted = dict.fromkeys(self._names, ">")
        while self._report is None:
            try:
                read = redis.xreadgroup(group, consumer, wanted, count=self._order.taken, block=60_000)
            except ResponseError:
                if self._report is None:
                    raise
                return  # the streams are gone: all is done
            if self._order.rate:
                now = time.monotonic()
                self._tally.latencies += [
                    now - float(fields[b"sent"]) for _, some in read for _, fields in some
                ]
            pipeline = redis.pipeline(transaction=False)
            for name, entries in read:
                ids = [id for id, _ in entries]
                pipeline.xack(name, group, *ids)
                if self._order.subscriptions == 1:  # of several, none can tell when all have acked
                    pipeline.xdel(name, *ids)
            pipeline.execute()
            self._count(sum(len(entries) for _, entries in read))

    def _count(self, messages: int) -> None:
        with self._lock:
            if messages and self._tally.count(messages):
                self._report = self._tally.report()
                self._redis.delete(*self._names)  # which ends those who wait for more


class _Shared:
    """An iterator for several threads."""

    def __init__(self, items: Iterator[int]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)


def _connect(url: str) -> Any:
    redis = Redis.from_url(url, single_connection_client=True)
    redis.ping()
    return redis


def _start(calls: list[tuple[Any, ...]]) -> list[threading.Thread]:
    """Call functions with their arguments, each in a thread of its own."""
    threads = [threading.Thread(target=function, args=arguments) for function, *arguments in calls]
    for thread in threads:
        thread.start()
    return threads


def stream_of(key: str, names: list[str]) -> str:
    """The stream that has the messages of a key."""
    return names[crc32(key.encode()) % len(names)]


def _add(redis: Any, order: Order, portions: Iterator[int], call: int) -> None:
    names, keys = streams(order), order.keys_of(call)
    body = {"body": b"x" * order.body} if order.body else {}
    for count in portions:
        if count == 1:
            key = next(keys)
            redis.xadd(stream_of(key, names), {"key": key, **body})
            continue
        pipeline = redis.pipeline(transaction=False)
        for _ in range(count):
            key = next(keys)
            pipeline.xadd(stream_of(key, names), {"key": key, **body})
        pipeline.execute()


def _add_at(redis: Any, order: Order) -> None:
    names, keys = streams(order), order.keys_of(0)
    body = {"body": b"x" * order.body} if order.body else {}
    for _ in order.instants():
        key = next(keys)
        redis.xadd(stream_of(key, names), {"key": key, "sent": repr(time.monotonic()), **body})
