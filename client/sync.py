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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from client.aio import AsyncClient
from client.bridge import Bridge, LoopThread
from client.columns import Columns, Tally
from client.errors import BrokerError, ConnectionClosed, InvalidArgument, answers
from client.message import Message
from client.payloads import PayloadStore
from client.sync_consumer import SyncConsumer
from client.sync_message import SyncMessage
from client.times import Position, Seconds, seconds
from client.types import (
    Backoff,
    Body,
    Claim,
    ClusterInfo,
    ClusterReport,
    Delivery,
    Mode,
    OutgoingMessage,
    Page,
    PartitionInfo,
    PartitionMove,
    PartitionOffsets,
    PeekedMessage,
    Published,
    RawPage,
    SubscriptionInfo,
    TopicInfo,
)

_SLICE = 10_000  # messages of publish_many that go to the event loop at once
_CLOSE = 15.0  # seconds for what cannot be waited for any longer when it closes, besides the handlers
_AT_EXIT = 5.0  # seconds for handlers that still run when the program ends
T = TypeVar("T")
_log = logging.getLogger("keylane.client")
_open: "set[Client]" = set()


class Client:
    """A client of a Keylane cluster; use it as a context manager. For everything else see AsyncClient.

    Callbacks (`on_time_drift`, `on_stale`) run on the event loop's thread: they must not wait.
    """

    def __init__(
        self,
        seeds: str | Iterable[str] | None = None,
        *,
        token: str | None = None,
        payloads: PayloadStore | str | None = None,
        producer_group: str | None = None,
        on_time_drift: Callable[[float], None] | None = None,
        timeout: Seconds = 30.0,
    ) -> None:
        self._client = AsyncClient(
            seeds,
            token=token,
            payloads=payloads,
            producer_group=producer_group,
            on_time_drift=on_time_drift,
            timeout=timeout,
        )
        self._thread: LoopThread | None = None

    def __enter__(self) -> "Client":
        if self._thread is not None:
            raise InvalidArgument("this client was opened before: make another")
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
        """Close all consumers and the connection; publishes that are not answered raise ConnectionClosed.

        Handlers that run have up to `timeout` to end. Any thread may call this, also a handler's, and a
        signal handler; in a fork of the process that has opened the client it does nothing.
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
            raise ConnectionClosed("the client is not open: use it with `with`")
        return self._thread.bridge

    def _call(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        return self._bridge.call(work, *args, **options)

    # Topics and subscriptions

    def info(self) -> ClusterInfo:
        """What there is to know of the cluster."""
        return self._call(self._client.info)

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        dedupe_window: Seconds | None = None,
        exist_ok: bool = False,
        journal: bool | int = False,
    ) -> TopicInfo:
        """Make a topic; TopicExists if there is one, unless that is all right."""
        return self._call(
            self._client.create_topic,
            name,
            partitions=partitions,
            dedupe_window=dedupe_window,
            exist_ok=exist_ok,
            journal=journal,
        )

    def change_topic(self, name: str, *, journal: bool | int) -> TopicInfo:
        """Switch the journal of a topic on, which begins it anew, or off, which leaves what is there."""
        return self._call(self._client.change_topic, name, journal=journal)

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._call(self._client.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """What there is to know of a topic."""
        return self._call(self._client.describe_topic, name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages and subscriptions."""
        self._call(self._client.delete_topic, name)

    def create_subscription(
        self,
        topic: str,
        name: str,
        *,
        mode: Mode = "shared",
        start: Position = "latest",
        lease: Seconds = 30.0,
        backoff: Seconds | Backoff | None = None,
        delivery: Delivery = "at_least_once",
        exist_ok: bool = False,
    ) -> None:
        """Make a subscription; SubscriptionExists if there is one, unless that is all right."""
        self._call(
            self._client.create_subscription,
            topic,
            name,
            mode=mode,
            start=start,
            lease=lease,
            backoff=backoff,
            delivery=delivery,
            exist_ok=exist_ok,
        )

    def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """What there is to know of a subscription."""
        return self._call(self._client.describe_subscription, topic, name)

    def pause_subscription(self, topic: str, name: str) -> None:
        """Stop deliveries to all consumers; what is leased stays leased."""
        self._call(self._client.pause_subscription, topic, name)

    def resume_subscription(self, topic: str, name: str) -> None:
        """Go on with deliveries."""
        self._call(self._client.resume_subscription, topic, name)

    def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription; what only it was owed goes with it."""
        self._call(self._client.delete_subscription, topic, name)

    def seek(self, topic: str, subscription: str, position: Position) -> None:
        """Go on from "earliest", "latest", a message's id (in its partition only) or a time."""
        self._call(self._client.seek, topic, subscription, position)

    def peek(
        self, topic: str, subscription: str, *, partition: int | None = None, limit: int = 10
    ) -> list[PeekedMessage]:
        """Look at unsettled messages without leasing them."""
        return self._call(self._client.peek, topic, subscription, partition=partition, limit=limit)

    # The cluster

    def cluster(self) -> ClusterReport:
        """The workers, what they do, and who places the partitions."""
        return self._call(self._client.cluster)

    def partitions(self, topic: str) -> list[PartitionInfo]:
        """Who serves the partitions of a topic, and what they hold."""
        return self._call(self._client.partitions, topic)

    def rebalance(self, *, dry_run: bool = False) -> list[PartitionMove]:
        """Place partitions by counts and load now; what moves, or would."""
        return self._call(self._client.rebalance, dry_run=dry_run)

    def move_partition(
        self, topic: str, partition: int, worker: str, *, keep: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Give a partition to a worker; it moves as soon as the one that has it has let go."""
        self._call(self._client.move_partition, topic, partition, worker, keep=keep)

    def drain_worker(self, worker: str) -> None:
        """Have a worker give all its partitions to others, and get none until it is started again."""
        self._call(self._client.drain_worker, worker)

    def undrain_worker(self, worker: str) -> None:
        """Let a worker that is drained have partitions again."""
        self._call(self._client.undrain_worker, worker)

    # Reading by position

    def offsets(
        self, topic: str, subscription: str | None = None, *, ledgers: Mapping[int, int] | None = None
    ) -> list[PartitionOffsets]:
        """Where the log of each partition begins and ends, and how far a subscription is."""
        return self._call(self._client.offsets, topic, subscription, ledgers=ledgers)

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        limit: int = 5_000,
        journal: bool = False,
        incarnation: int = 0,
    ) -> Page:
        """The messages from position `start` up to, not including, `end`, as many as one answer takes."""
        return self._call(
            self._client.read,
            topic,
            partition,
            start,
            end,
            limit=limit,
            journal=journal,
            incarnation=incarnation,
        )

    def read_raw(
        self, topic: str, partition: int, start: int, end: int, *, limit: int = 5_000, incarnation: int = 0
    ) -> RawPage:
        """The same as Redis sent it, which costs the worker hardly any work; see `client.lines`."""
        return self._call(
            self._client.read_raw, topic, partition, start, end, limit=limit, incarnation=incarnation
        )

    def claim(
        self,
        topic: str,
        subscription: str,
        reader: str,
        *,
        session: Seconds = 10.0,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> Claim:
        """Open or renew the session of the one reader of a subscription of mode cursor."""
        return self._call(
            self._client.claim,
            topic,
            subscription,
            reader,
            session=session,
            incarnation=incarnation,
            subscription_incarnation=subscription_incarnation,
        )

    def release(self, topic: str, subscription: str, reader: str) -> None:
        """End the session of a reader, if it is still its own."""
        self._call(self._client.release, topic, subscription, reader)

    def commit(
        self,
        topic: str,
        subscription: str,
        reader: str,
        positions: Mapping[int, int],
        *,
        sought: Mapping[int, int] | None = None,
        ledgers: Mapping[int, int] | None = None,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> None:
        """All before these positions, by partition, is done with: what nobody else is owed is deleted."""
        self._call(
            self._client.commit,
            topic,
            subscription,
            reader,
            positions,
            sought=sought,
            ledgers=ledgers,
            incarnation=incarnation,
            subscription_incarnation=subscription_incarnation,
        )

    def bodies(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Bodies by their names, which are in `about` (or the uid); None for one that is not there."""
        return self._call(self._client.bodies, topic, names)

    def has_bodies(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Whether the payload store has bodies, by their names; none of them is read."""
        return self._call(self._client.has_bodies, topic, names)

    # Publishing and consuming

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
    ) -> Published:
        """Publish a message; answers when it is stored as durably as asked for.

        With `delay`, or `deliver_at`, it is kept apart until then, and has no id before.
        """
        return self._call(
            self._client.publish,
            topic,
            data,
            key=key,
            attributes=attributes,
            partition=partition,
            uid=uid,
            durability=durability,
            delay=delay,
            deliver_at=deliver_at,
        )

    def publish_many(self, topic: str, messages: Iterable[OutgoingMessage]) -> list[Published]:
        """Publish messages, those of a partition in the order given; answers when all are stored.

        If some are and others are not it raises PublishFailed, whose `published` has what became of each: one
        that cannot be published keeps none of the others back. If all have failed alike it raises just that:
        TopicNotFound, say.
        """
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
        return answers(published)

    def publish_columns(self, topic: str, columns: Columns) -> Future[Tally]:
        """Queue messages given by columns, a few thousand at a time; the future tells what became of them.

        It returns when they are queued, behind those of the call before, so that several calls are under way.
        Once a part could not be published, nothing behind it in its partition is, by this client: publish all
        of it again, with the same uids, by another one. If the topic was replaced that holds for all of it.
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
        durability: str | None = None,
    ) -> dict[str, Published]:
        """Publish the same message to several topics; raises the first error when all have ended."""
        return self._call(
            self._client.fan_out, topics, data, key=key, attributes=attributes, durability=durability
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
        on_stale: Callable[[Message], None] | None = None,
        partitions: Sequence[int] | None = None,
        handler: Callable[[SyncMessage], Any] | None = None,
        concurrency: int = 16,
    ) -> SyncConsumer:
        """A consumer of a subscription, to be entered with `with`; with `handler` it runs that in threads."""
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
            on_stale=on_stale,
            partitions=partitions,
            handler=handler,
            concurrency=concurrency,
        )
        return SyncConsumer(self._call(_made, make), self._bridge)


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
