"""The client for code that does not await: AsyncClient in a thread with an event loop of its own.

with Client("keylane://localhost") as client:
    client.publish("orders", b"42", key="customer-7")

    with client.subscribe("orders", "billing") as consumer:
        for message in consumer:
            with message:                       # ack on exit, nack when it raises
                charge(message.data())
"""

import asyncio
import atexit
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from keylane import tracing
from keylane.async_client import AsyncClient
from keylane.bridge import Bridge, LoopThread
from keylane.consume.message import Message
from keylane.consume.sync_message import SyncMessage
from keylane.errors import BrokerError, ConnectionClosed, InvalidArgument
from keylane.payloads import PayloadStore
from keylane.produce.answers import all_published
from keylane.produce.columns import Columns, Tally
from keylane.produce.outgoing import with_durability
from keylane.sync.administration import SyncAdministration
from keylane.sync.consumer import SyncConsumer
from keylane.sync.dead_letters import SyncDeadLetters
from keylane.sync.reading import SyncReading
from keylane.sync.single_messages import SyncSingleMessages
from keylane.sync.tokens import SyncTokens
from keylane.times import Position, Seconds, seconds
from keylane.types import (
    Body,
    Mode,
    OutgoingMessage,
    Published,
)

_SLICE = 10_000  # messages of publish_many that go to the event loop at once
_CLOSE = 15.0  # seconds for what cannot be waited for any longer when it closes, besides the handlers
_AT_EXIT = 5.0  # seconds for handlers that still run when the program ends
T = TypeVar("T")
_log = logging.getLogger("keylane.client")
_open: "set[Client]" = set()


class Client(SyncAdministration, SyncDeadLetters, SyncSingleMessages, SyncTokens, SyncReading):
    """A client of a Keylane cluster, to be used as a context manager. For the arguments see AsyncClient.

    Callbacks (`on_time_drift`, `on_stale`) run on the event loop's thread and must not block.
    """

    def __init__(
        self,
        seeds: str | Iterable[str] | None = None,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        payloads: PayloadStore | str | None = None,
        producer_group: str | None = None,
        on_time_drift: Callable[[float], None] | None = None,
        timeout: Seconds = 30.0,
    ) -> None:
        self._client = AsyncClient(
            seeds,
            token=token,
            tls=tls,
            payloads=payloads,
            producer_group=producer_group,
            on_time_drift=on_time_drift,
            timeout=timeout,
        )
        self._thread: LoopThread | None = None

    def __enter__(self) -> "Client":
        if self._thread is not None:
            raise InvalidArgument("this client was opened before: create another")
        self._thread = thread = LoopThread("the client was closed")
        try:
            thread.bridge.call(self._client.__aenter__)
        except BaseException:
            self.close(0.0)
            raise
        _open.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout: Seconds = 30.0) -> None:
        """Close all consumers and connections; unanswered publishes raise ConnectionClosed.

        Running handlers have up to `timeout` to finish. Any thread may call this, even a handler's, and so
        may a signal handler; in a fork of the process that opened the client it does nothing.
        """
        patience = seconds("timeout", timeout)
        thread = self._thread
        if thread is None or thread.bridge.forked:
            return
        try:
            with suppress(ConnectionClosed):  # it was closed before
                thread.bridge.call_within(patience + _CLOSE, self._client.close, patience)
        except TimeoutError:
            _log.warning("the client did not close within %g s: it is left as it is", patience + _CLOSE)
        finally:
            thread.stop(_CLOSE)
            _open.discard(self)

    @property
    def _bridge(self) -> Bridge:
        if self._thread is None:
            raise InvalidArgument("the client is not open: use it with `with`")
        return self._thread.bridge

    def _call(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        return self._bridge.call(work, *args, **options)

    def publish(
        self,
        topic: str,
        data: Body = None,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        partition: int | None = None,
        uid: str | None = None,
        durability: str | None = None,
        delay: Seconds | None = None,
        deliver_at: datetime | None = None,
        ttl: Seconds | None = None,
        expires_at: datetime | None = None,
        priority: int | None = None,
    ) -> Published:
        """Publish a message; returns once it is stored as durably as asked for.

        With `delay` or `deliver_at` it is held back until then, and has no id before.
        """
        message = OutgoingMessage(
            data, key, attributes, partition, uid, durability, delay, deliver_at, ttl, expires_at, priority
        )
        publish_one = self._client._producer.publish_one
        if (tracer := tracing.tracer()) is None:
            return self._call(publish_one, topic, message)
        with tracing.publish_span(tracer, topic) as span:  # the context is the caller's
            return span.published(self._call(publish_one, topic, span.stamped(message)))

    def publish_many(
        self, topic: str, messages: Iterable[OutgoingMessage], *, durability: str | None = None
    ) -> list[Published]:
        """Publish messages, those of a partition in the order given; returns once all are stored.

        `durability` is for those that do not say one. A message that cannot be published does not hold
        back the others: raises PublishFailed, whose `published` has the result of each; where the backlog
        quota had room for some only, that is a BacklogFull as well. If all fail in the same way, raises that
        error, such as TopicNotFound.
        """
        messages = with_durability(messages, durability)
        if (tracer := tracing.tracer()) is None:
            return self._publish_many(topic, messages)
        with tracing.publish_span(tracer, topic) as span:  # the context is the caller's
            return self._publish_many(topic, span.all_stamped(messages))

    def _publish_many(self, topic: str, messages: Iterable[OutgoingMessage]) -> list[Published]:
        # The caller's iterable runs in the caller's thread: it may block.
        published: list[Published | Exception] = []
        rest = iter(messages)
        while some := list(islice(rest, _SLICE)):
            try:
                published += self._call(self._client._producer.publish, topic, some)
            except BrokerError as error:
                if not published:
                    raise
                some += rest if isinstance(messages, Sequence) else ()
                published += [error] * len(some)
                break
        return all_published(published)

    def publish_columns(self, topic: str, columns: Columns) -> Future[Tally]:
        """Queue messages given as columns, a few thousand at a time; the future has the result.

        It returns once they are queued behind those of the call before: several calls can be in flight.
        After a failure this client publishes nothing more behind it in that partition: publish everything
        again, with the same uids, with another client. If the topic was replaced, that holds for all of it.
        """
        task = self._call(self._client.publish_columns, topic, columns)
        return self._bridge.start(_result_of, task)

    def fan_out(
        self,
        topics: Iterable[str],
        data: Body = None,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        partition: int | None = None,
        uid: str | None = None,
        durability: str | None = None,
        delay: Seconds | None = None,
        deliver_at: datetime | None = None,
        ttl: Seconds | None = None,
        expires_at: datetime | None = None,
        priority: int | None = None,
    ) -> dict[str, Published]:
        """Publish the same message to several topics, with the options of publish.

        Raises the first error once all have finished.
        """
        return self._call(
            self._client.fan_out,
            topics,
            data,
            key=key,
            attributes=attributes,
            partition=partition,
            uid=uid,
            durability=durability,
            delay=delay,
            deliver_at=deliver_at,
            ttl=ttl,
            expires_at=expires_at,
            priority=priority,
        )

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        mode: Mode | None = "shared",
        start: Position = "latest",
        name: str | None = None,
        permits: int = 1_000,
        lease: Seconds | None = None,
        auto_extend: bool | Seconds = True,
        keys: str | None = None,
        filter: Mapping[str, str | None] | None = None,
        on_stale: Callable[[Message], None] | None = None,
        partitions: Sequence[int] | None = None,
        handler: Callable[[SyncMessage], Any] | None = None,
        concurrency: int = 16,
    ) -> SyncConsumer:
        """Return a consumer, to be entered with `with`.

        A `handler` runs in threads, from this call on until the consumer is closed, or this client.
        """
        make = partial(
            self._client.subscribe,
            topic,
            subscription,
            mode=mode,
            start=start,
            name=name,
            permits=permits,
            lease=lease,
            auto_extend=auto_extend,
            keys=keys,
            filter=filter,
            on_stale=on_stale,
            partitions=partitions,
            handler=handler,
            concurrency=concurrency,
        )
        consumer = SyncConsumer(self._call(_made, make), self._bridge)
        return consumer if handler is None else consumer.begin()


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


async def _made(make: Callable[[], T]) -> T:
    return make()


@atexit.register
def _close_all() -> None:
    """A program ends that has not closed them: what it has settled is to arrive."""
    for client in list(_open):
        try:
            client.close(_AT_EXIT)
        except Exception:
            _log.exception("a client could not be closed when the program ended")
