"""The client for asyncio.

async with AsyncClient("keylane://localhost") as client:
    await client.publish("orders", b"42", key="customer-7")

    async with client.subscribe("orders", "billing", mode="key_shared") as consumer:
        async for message in consumer:
            async with message:                 # ack on exit, nack when it raises
                await charge(await message.data())
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from types import TracebackType
from weakref import WeakSet

from keylane import tracing, wire
from keylane.checks import check, check_callable
from keylane.connect.cluster import Cluster
from keylane.connect.seeds import server_or_default, token_or_default
from keylane.consume.consumer import Consumer
from keylane.consume.handlers import Handler
from keylane.consume.message import Message
from keylane.consume.options import ConsumerOptions
from keylane.dead_letters import DeadLetters
from keylane.errors import InvalidArgument, TopicNotFound
from keylane.payloads import PayloadStore
from keylane.payloads.bodies import Bodies
from keylane.produce.answers import all_published
from keylane.produce.columns import Columns, Tally
from keylane.produce.outgoing import with_durability
from keylane.produce.producer import Producer
from keylane.single_messages import SingleMessages
from keylane.tasks import finished
from keylane.times import Position, Seconds, seconds
from keylane.tokens import Tokens
from keylane.types import Body, Mode, OutgoingMessage, Published

_CLOSE = 5.0  # seconds to delete the bodies that nobody needs any more


class AsyncClient(DeadLetters, SingleMessages, Tokens):
    """A client of a Keylane cluster, to be used as an async context manager.

    `seeds` is a URL, a list of URLs, or "keylane://a:9999,b:9999" (keylanes:// for TLS); it defaults to
    KEYLANE_SERVER, then keylane://127.0.0.1:9999. `token` defaults to KEYLANE_TOKEN. `tls` says whom
    to trust and who you are, where the system's authorities do not. `payloads` is where bodies are stored, by
    default in the store that the cluster advertises. `on_time_drift` is called with the
    seconds by which the cluster's clock is ahead of this machine's, if more than one. `timeout` is how many
    seconds an operation is retried while the broker cannot be reached.
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
        limit = seconds("timeout", timeout)
        for what, text in (("token", token), ("producer_group", producer_group)):
            check(what, text, str | None)
        if not isinstance(tls, ssl.SSLContext | None):
            raise InvalidArgument(f"tls is {tls!r:.60}: use an ssl.SSLContext")
        check_callable("on_time_drift", on_time_drift)
        token = token_or_default(token)
        self._bodies = Bodies(
            payloads, self._greeting, self._owed, lambda: self._cluster.now, token=token, tls=tls
        )
        self._cluster = Cluster(
            server_or_default(seeds),
            token=token,
            tls=tls,
            timeout=limit,
            on_time_drift=on_time_drift,
            bodies=self._bodies,
        )
        self._producer_group = producer_group or ""
        self._producer = Producer(self._cluster, self._bodies, producer_group)
        self._streams = count(1)
        self._consumers: WeakSet[Consumer] = WeakSet()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "AsyncClient":
        await self._cluster.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, timeout: Seconds = 30.0) -> None:  # noqa: ASYNC109
        """Close all consumers and connections; unanswered publishes raise ConnectionClosed.

        Running handlers have up to `timeout` to finish.
        """
        patience = seconds("timeout", timeout)
        for consumer in list(self._consumers):
            consumer.excuse()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(patience))
        await finished(self._closing, self._hurry)

    def _hurry(self) -> None:
        for consumer in list(self._consumers):
            consumer.hurry()

    async def _close(self, patience: float) -> None:
        try:
            # All at once: while the broker is away each takes its time.
            await asyncio.gather(*(consumer.close(patience) for consumer in list(self._consumers)))
        finally:
            await self._producer.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE):
                    await self._bodies.finish()
            with suppress(TimeoutError):  # a store may wait for threads
                async with asyncio.timeout(_CLOSE):
                    await self._bodies.close()
            await self._cluster.close()

    async def publish(
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

        With `delay` or `deliver_at` it is held back until then; it gets its place in the order, and its id,
        when it is due. A `uid` of your own identifies the message together with its key: published again
        within the topic's dedupe window, it is not stored and returns the first one's id, and `duplicate`.
        After `ttl`, or at `expires_at`, it is delivered to nobody any more; `ttl` counts from when it is due.
        Of what waits in a shared subscription, larger `priority` goes first: 0, which is the default, to 9.

        >>> published = await client.publish("orders", b"42", key="customer-7")
        """
        message = OutgoingMessage(
            data, key, attributes, partition, uid, durability, delay, deliver_at, ttl, expires_at, priority
        )
        if (tracer := tracing.tracer()) is None:
            return await self._producer.publish_one(topic, message)
        with tracing.publish_span(tracer, topic) as span:
            return span.published(await self._producer.publish_one(topic, span.stamped(message)))

    async def publish_many(
        self, topic: str, messages: Iterable[OutgoingMessage], *, durability: str | None = None
    ) -> list[Published]:
        """Publish messages, those of a partition in the order given; returns once all are stored.

        `durability` is for those that do not say one. A message that cannot be published does not hold
        back the others: raises PublishFailed, whose `published` has the result of each; where the backlog
        quota had room for some only, that is a BacklogFull as well. If all fail in the same way, raises that
        error, such as TopicNotFound.

        >>> await client.publish_many("orders", [OutgoingMessage(b"1", key="a"), OutgoingMessage(b"2")])
        """
        messages = with_durability(messages, durability)
        if (tracer := tracing.tracer()) is None:
            return all_published(await self._producer.publish(topic, messages))
        with tracing.publish_span(tracer, topic) as span:
            return all_published(await self._producer.publish(topic, span.all_stamped(messages)))

    async def publish_columns(self, topic: str, columns: Columns) -> asyncio.Task[Tally]:
        """Queue messages given as columns, a few thousand at a time; await the task for the result.

        It returns once they are queued behind those of the call before: several calls can be in flight.
        After a failure this client publishes nothing more behind it in that partition: publish everything
        again, with the same uids, with another client. If the topic was replaced, that holds for all of it.

        >>> under_way = await client.publish_columns("orders", Columns(keys=["a", "b"], bodies=[b"1", b"2"]))
        >>> (await under_way).stored
        2
        """
        return await self._producer.publish_columns(topic, columns)

    async def fan_out(
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
        if isinstance(topics, str):
            raise InvalidArgument(f"topics is {topics!r}: use a list of names, or publish")
        names = list(dict.fromkeys(topics))
        found = await asyncio.gather(
            *(
                self.publish(
                    topic,
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
                for topic in names
            ),
            return_exceptions=True,
        )
        published = {}
        for topic, answer in zip(names, found, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            published[topic] = answer
        return published

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
        handler: Handler | None = None,
        concurrency: int = 16,
    ) -> Consumer:
        """Return a consumer, to be entered with `async with`; creates the subscription if there is none.

        `mode` must be the subscription's; None accepts any. `start` is "earliest", "latest", an id or a time,
        and applies only if the subscription is created. `keys` (a glob on the key) and `filter` (attributes
        that are equal or, with None, are there) say what such a subscription is owed; of one that is there
        they must be the same, or left out. `permits` is how many messages the consumer may hold.
        `lease` overrides the subscription's for this consumer. Leases are extended while messages wait to be
        taken, and for up to an hour, or as long as `auto_extend` says, while the application has them; if it
        takes none for that long, waiting messages go back uncharged. `on_stale` is called with each message
        that was settled in the background, but too late. `handler` is run for each message, up to
        `concurrency` at a time; messages of a lane one after the other.

        >>> async with client.subscribe("orders", "billing") as consumer:
        ...     async for message in consumer:
        ...         async with message:
        ...             print(await message.data())
        """
        options = ConsumerOptions(
            mode,
            start,
            name,
            permits,
            lease,
            auto_extend,
            on_stale,
            partitions,
            handler,
            concurrency,
            keys,
            filter,
        )
        consumer = Consumer(self._cluster, self._bodies, self._streams, topic, subscription, options)
        self._consumers.add(consumer)
        return consumer

    async def _owed(self, topic: str, before: str) -> set[str]:
        """Return the names of the bodies that a topic still needs; none if there is no such topic."""
        names = set[str]()
        try:
            count = (await self.describe_topic(topic)).partitions
        except TopicNotFound:
            return names
        for partition in range(count):
            position = ""
            while True:
                question = wire.Owed(topic, partition, position, before)
                answer = await self._cluster.request_near(topic, partition, question)
                names.update(wire.unpack(answer.body, list[str]))
                position = wire.properties_of(answer, wire.OwedReply).position
                if not position:
                    break
        return names

    async def _greeting(self) -> wire.InfoReply:
        return (await self._cluster.connection(self._cluster.timeout)).info
