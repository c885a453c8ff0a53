"""A consumer: takes what workers push, hands it to the application, and reconnects."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.consume.block import HANDED, Block, Span
from keylane.consume.buffer import Buffer
from keylane.consume.downloads import Downloads
from keylane.consume.handlers import Handlers
from keylane.consume.lease_extender import LeaseExtender
from keylane.consume.leases import Leases
from keylane.consume.message import Batch, Message, Origin, spans_of
from keylane.consume.open_blocks import OpenBlocks
from keylane.consume.options import PATIENCE, ConsumerOptions, unique_name
from keylane.consume.receipts import ACK, GIVE_BACK, LAPSED, SettleKind, extend_kind, nack_kind
from keylane.consume.reopening import Reopening
from keylane.consume.settler import Settler
from keylane.consume.streams import Streams
from keylane.consume.unreadable import Unreadable
from keylane.errors import BrokerError, ConnectionClosed, InvalidArgument
from keylane.payloads.bodies import Bodies
from keylane.tasks import finished
from keylane.times import Seconds, seconds
from keylane.tracing import processing
from keylane.types import Outcome
from keylane.wire import Frame

_CLOSE = 5.0  # seconds for the last answers when it closes
T = TypeVar("T")
_log = logging.getLogger("keylane.client")


class Consumer:
    """Messages of a subscription.

    async with client.subscribe("orders", "billing") as consumer:
        async for message in consumer:
            async with message:
                print(await message.data())
    """

    def __init__(
        self,
        cluster: Cluster,
        bodies: Bodies,
        stream_numbers: Iterator[int],
        topic: str,
        subscription: str,
        options: ConsumerOptions,
    ) -> None:
        self.topic = topic
        self.subscription = subscription
        self.name = options.name or unique_name()
        request = options.request(topic, subscription, self.name)
        patience = options.patience()
        self._streams = Streams(
            cluster,
            stream_numbers,
            request,
            on_opening=self._opening,
            on_open=self._opened,
            on_data=self._received,
            on_leases_ended=self._leases_ended,
            on_cut_off=self._cut_off,
            on_void=self._void,
            on_end=self._ended,
        )
        self.leases = Leases(self._streams.credit, self._lapsed)
        self._reopening = Reopening(self.leases)
        self.extender = LeaseExtender(self.leases, patience, self._extend, self.give_back)
        self._settler = Settler(
            self.leases,
            self._streams,
            on_extended=self.extender.wake_at,
            on_stale=self._tell_stale,
            delete_bodies=partial(bodies.delete_later, topic),
        )
        self._unreadable = Unreadable(topic, self.leases, self._settler.submit)
        self._downloads = Downloads(topic, bodies)
        drift, process = (lambda: cluster.drift), processing(subscription)
        self._blocks = OpenBlocks()
        self.origin = Origin(topic, drift, self.leases, self._settler, self._downloads, self._blocks, process)
        self._buffer = Buffer(self.origin, (patience or PATIENCE) / 10)
        self._handlers: Handlers | None = None
        if options.handler is not None:
            said = f"consumer {self.name} of {topic!r}"
            self._handlers = Handlers(options.handler, options.concurrency, said, self._take_one, self.hand)
        self._on_stale = options.on_stale
        self._stale = 0  # messages that were settled too late since that was last logged
        self._permits = options.permits
        self._waiting: list[asyncio.Future[None]] = []
        self._mode = "shared"
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether it is closed or closing."""
        return self._closed

    @property
    def error(self) -> BrokerError | None:
        """What has ended it for good."""
        return self._streams.error

    @property
    def mode(self) -> str:
        """The subscription's mode."""
        return self._mode

    # Opening and closing

    async def __aenter__(self) -> "Consumer":
        if self._closed:
            raise ConnectionClosed("the consumer was closed: subscribe again")
        await self._streams.open()
        if self._handlers is not None:
            self._handlers.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, timeout: Seconds = 30.0) -> None:  # noqa: ASYNC109
        """Wait for handlers, and for `with message:` blocks of others, and give the rest back uncharged."""
        patience = seconds("timeout", timeout)
        self.excuse()
        if self._closing is None:
            self._closed = True
            self._wake()
            self._closing = asyncio.create_task(self._close(patience))
        await finished(self._closing, self.hurry)

    def excuse(self) -> None:
        """The handler or block that calls this waits until all is closed: nobody is to wait for it."""
        self._blocks.excuse()
        if self._handlers is not None:
            self._handlers.excuse()

    def hurry(self) -> None:
        """Wait for no handler or block any more."""
        self._blocks.hurry()
        if self._handlers is not None:
            self._handlers.hurry()

    async def _close(self, patience: float) -> None:
        try:
            if self._handlers is not None and self._streams.opened_all:
                await self._handlers.close(patience)
            elif self._handlers is None:
                await self._blocks.close(patience)
            self.extender.close()
            for last in (self._settler.finish, self._streams.leave):
                with suppress(
                    TimeoutError
                ):  # each has its own: what is not answered does not keep it from leaving
                    async with asyncio.timeout(_CLOSE):
                        await last()
        finally:
            self.extender.close()
            self.leases.clear()
            await self._settler.close()
            await self._downloads.close()
            await self._streams.close()

    async def wait(self) -> None:
        """Wait until the consumer is closed; raises the error that ended it, if any."""
        while not self._closed and self._streams.error is None:
            await self._more()
        if self._streams.error is not None:
            raise self._streams.error.again()

    # Taking messages

    def check_by_hand(self) -> None:
        """Refuse who wants to take messages that a handler gets."""
        if self._handlers is not None:
            raise InvalidArgument(
                "this consumer has a handler, which gets every message: wait() for its end, or subscribe "
                "without handler= to take messages yourself"
            )

    def __aiter__(self) -> "Consumer":
        self.check_by_hand()
        return self

    async def __anext__(self) -> Message:
        while not self._closed:
            if (message := self._buffer.pop()) is not None:
                return message
            await self._more()
        raise StopAsyncIteration

    async def receive(self, timeout: Seconds | None = None) -> Message:  # noqa: ASYNC109
        """Return the next message. Raises TimeoutError if none arrives in time."""
        self.check_by_hand()
        return await self._within(timeout, self.__anext__)

    async def _within(self, patience: Seconds | None, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        limit = None if patience is None else seconds("timeout", patience)
        try:
            async with asyncio.timeout(limit):
                return await work()
        except TimeoutError:
            raise TimeoutError(
                f"no message from {self.subscription!r} of {self.topic!r} in {limit} s"
            ) from None
        except StopAsyncIteration:
            raise ConnectionClosed("the consumer is closed") from None

    def batches(self, max_messages: int = 1_000, max_wait: Seconds = 0.0) -> "Batches":
        """Iterate over batches of what has arrived, waiting up to `max_wait` after the first for more."""
        self.check_by_hand()
        if type(max_messages) is not int or max_messages < 1:
            raise InvalidArgument(f"max_messages is {max_messages!r}: use an integer of at least 1")
        # More than the permits never come together.
        return Batches(self, min(max_messages, self._permits), seconds("max_wait", max_wait))

    async def take(self, limit: int, wait: float = 0.0, *, handed: bool = True) -> Batch:
        """Return at least one message, and what else is there or arrives within `wait` seconds."""
        end: float | None = None
        while not self._closed:
            # Nothing is taken before it is returned: who is cancelled while waiting loses nothing.
            if (waiting := len(self._buffer)) and end is None:
                end = monotonic() + wait
            if end is not None and (waiting >= limit or monotonic() >= end):
                if spans := self._buffer.take(limit, handed=handed):
                    return Batch(spans, self.origin)
                end = None
            try:
                async with asyncio.timeout(None if end is None else end - monotonic()):
                    await self._more()
            except TimeoutError:
                pass
        raise StopAsyncIteration

    async def _take_one(self) -> Message:
        (message,) = await self.take(1, handed=False)
        return message

    async def pull(self, limit: int, wait: float = 0.0, timeout: Seconds | None = None) -> Batch:  # noqa: ASYNC109
        """Take messages to be handed out one by one, see `hand`. Raises ConnectionClosed at the end."""
        return await self._within(timeout, partial(self.take, limit, wait, handed=False))

    async def hand(self, message: Message) -> bool:
        """Put what was pulled into the application's hands, after a pause; False if it has gone back."""
        while self.leases.paused and not self._closed and self._streams.error is None:
            await self._news()
        return self.leases.hand(message._block, message._index)

    # Settling and flow

    async def ack(self, messages: Iterable[Message]) -> list[Outcome]:
        """Ack messages. Returns "settled" or "stale" for each, in the order given."""
        return await self._settler.many(ACK, spans_of(messages, self.origin))

    async def nack(
        self,
        messages: Iterable[Message],
        delay: Seconds | None = None,
        *,
        until: datetime | None = None,
        reason: str | None = None,
    ) -> list[Outcome]:
        """Nack messages. Returns "settled" or "stale" for each, in the order given."""
        return await self._settler.many(nack_kind(delay, until, reason), spans_of(messages, self.origin))

    async def extend(
        self, messages: Iterable[Message], seconds: Seconds | None = None, *, until: datetime | None = None
    ) -> list[Outcome]:
        """Extend leases from now. Returns "settled" or "stale" for each, in the order given."""
        return await self._settler.many(extend_kind(seconds, until), spans_of(messages, self.origin))

    def offer_permits(self, held: Mapping[int, int], more: int) -> None:
        """Let each worker send so many more than are held of its partitions, instead of sharing permits.

        For somebody who takes messages now and then: with 0 nothing comes that nobody has asked for.
        """
        self._streams.offer_permits(held, more)

    async def pause(self) -> None:
        """Stop deliveries at once; messages that the application does not have go back uncharged."""
        self.leases.paused = True
        self._streams.pause(True)
        self._buffer.hold()  # at most once: it cannot go back, and waits for resume
        await self.give_back()

    async def resume(self) -> None:
        """Resume deliveries after a pause."""
        self.leases.paused = False
        self._streams.pause(False)
        self._buffer.release()
        self._wake()

    def give_back(self, spans: Iterable[Span] | None = None) -> asyncio.Future[None]:
        """Of these messages, or of all, what is not yet with the application goes back uncharged."""
        return self._settler.submit(GIVE_BACK, self.leases.withdraw(spans))

    def _extend(self, spans: list[Span]) -> asyncio.Future[None]:
        """Extend leases by as much as they were at first."""
        kind = SettleKind(int(wire.Type.EXTEND), max(1, round(self.leases.lease * 1000)))
        return self._settler.submit(kind, spans)

    # What comes

    def _opening(self, partitions: Collection[int]) -> AbstractContextManager[None]:
        return self._reopening.foreseeing(partitions)

    def _opened(self, partitions: Collection[int], reply: wire.SubscribeReply) -> None:
        self._mode = reply.mode
        self.leases.mode = "shared" if reply.mode == "multicast" else reply.mode  # what the lanes are
        self.leases.lease = reply.lease_ms / 1000
        self.leases.reach(partitions)
        self._reopening.reopen(partitions, reply.held)

    def _received(self, frame: Frame, data: wire.Data) -> None:
        if self._closed:
            return  # it goes back with the rest
        block = Block(frame, data, monotonic())
        if not len(block):
            return  # all of what it held was settled while the worker looked
        if data.settled is None and data.held:
            self._reopening.keep(block)
        elif data.settled is None:
            self.leases.add(block)
            self._reopening.note(block)
        if block.faults:
            self._unreadable.nack(block)
        if self.leases.paused and data.settled is None:
            self.give_back([(block, 0, len(block))])
        else:
            self._buffer.add(block)
            self._downloads.expect(block)
        self.extender.wake_at(block.soonest)
        self._wake()

    def _leases_ended(self, frame: Frame, said: wire.Ended) -> None:
        """The worker says that leases are over."""
        if said.up_to:
            self.leases.void(said.partition, said.up_to)
        elif frame.body:
            self.leases.lose(said.partition, wire.unpack(frame.body, list[int]))

    def _lapsed(self, spans: list[Span]) -> None:
        """The deadline of a lane has passed: its first message is nacked, unless all goes back anyway."""
        if self._closed:
            return
        self.give_back(spans)
        if in_hands := [span for span in spans if span[0].states[span[1]] == HANDED]:
            self._settler.submit(LAPSED, in_hands)

    def _cut_off(self, partitions: Collection[int], until: float) -> None:
        self.leases.cut_off(partitions, until)

    def _void(self, partitions: Collection[int]) -> None:
        """A worker has let go of the consumer."""
        self.leases.clear(partitions)
        self._wake()

    def _ended(self, error: BrokerError) -> None:
        self.leases.clear()
        self._wake()

    def _tell_stale(self, block: Block, index: int) -> None:
        self._stale += 1
        if self._stale == 1:
            try:
                asyncio.get_running_loop().call_soon(self._warn_of_stale, block.id(index))
            except RuntimeError:  # a thread tells it, after the client was closed: no others will follow
                self._warn_of_stale(block.id(index))
        if self._on_stale is not None:
            try:
                self._on_stale(Message(block, index, self.origin))
            except Exception:
                _log.exception("on_stale failed for message %s", block.id(index))

    def _warn_of_stale(self, first: str) -> None:
        """Log once for all that were found stale together."""
        _log.warning(
            "%s: %d messages were settled after their leases had ended, and may be delivered again: %s%s",
            f"consumer {self.name} of {self.origin.topic!r}",
            self._stale,
            first,
            " and others" if self._stale > 1 else "",
        )
        self._stale = 0

    # Waiting

    async def _more(self) -> None:
        """Wait until something has come or it has ended; raises what ended it."""
        if self._streams.error is not None:
            raise self._streams.error.again()
        if not self._streams.opened_all:
            raise InvalidArgument(
                "the consumer is not open: use it with `async with` (without await: `with`)"
            )
        await self._news()

    async def _news(self) -> None:
        more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(more)
        try:
            await more
        except BaseException:
            if more in self._waiting:
                self._waiting.remove(more)
            raise

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for more in waiting:
            if not more.done():
                more.set_result(None)


class Batches:
    """Iterates over the batches of a consumer."""

    def __init__(self, consumer: Consumer, max_messages: int, max_wait: float) -> None:
        self._consumer = consumer
        self._max_messages = max_messages
        self._max_wait = max_wait

    def __aiter__(self) -> "Batches":
        return self

    async def __anext__(self) -> Batch:
        return await self._consumer.take(self._max_messages, self._max_wait)

    async def pull(self) -> Batch:
        """Return the next batch, to be handed to the application message by message: see Consumer.hand."""
        return await self._consumer.pull(self._max_messages, self._max_wait)
