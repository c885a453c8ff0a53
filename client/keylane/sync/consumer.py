"""A consumer for code that does not await."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from keylane.bridge import Bridge
from keylane.consume.block import BUFFERED, Block
from keylane.consume.consumer import Consumer
from keylane.consume.message import Batch, Message
from keylane.consume.sync_message import SyncBatch, SyncMessage
from keylane.errors import ConnectionClosed, InvalidArgument
from keylane.times import Seconds, seconds
from keylane.types import Outcome

T = TypeVar("T")
_PULL = 100  # messages taken from the event loop's thread at once


class SyncConsumer:
    """Messages of a subscription; iterate over it, or call receive.

    with client.subscribe("orders", "billing") as consumer:
        for message in consumer:
            with message:
                print(message.data())
    """

    def __init__(self, consumer: Consumer, bridge: Bridge) -> None:
        self._consumer = consumer
        self._bridge = bridge
        self._call = bridge.call
        self._began = False
        self._pulled: deque[tuple[Block, int]] = deque()  # at hand, for any thread

    def __enter__(self) -> "SyncConsumer":
        if not self._began or self._consumer.closed:
            self._call(self._consumer.__aenter__)
        return self

    def begin(self) -> "SyncConsumer":
        """Run the handler from now on, whether or not it is entered as well."""
        self.__enter__()
        self._began = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout: Seconds = 30.0) -> None:
        """Wait for handlers, and for `with message:` blocks of others, and give the rest back uncharged."""
        if self._bridge.forked:
            return  # it is the parent's
        self._pulled.clear()
        with suppress(ConnectionClosed):  # the client was closed, and so was this
            self._call(self._consumer.close, timeout)

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._consumer.name

    @property
    def mode(self) -> str:
        """The subscription's mode."""
        return self._consumer.mode

    def wait(self) -> None:
        """Wait until the consumer is closed; raises the error that ended it, if any."""
        self._call(self._consumer.wait)

    def __iter__(self) -> Iterator[SyncMessage]:
        self._consumer.check_by_hand()
        while True:
            message = self._next()
            if message is None:
                if not self._pull(self._consumer.pull, _PULL):
                    return
            else:
                yield message

    def receive(self, timeout: Seconds | None = None) -> SyncMessage:
        """Return the next message. Raises TimeoutError if none arrives in time."""
        self._consumer.check_by_hand()
        end = None if timeout is None else monotonic() + seconds("timeout", timeout)
        while (message := self._next()) is None:
            self._call(self._fill, self._consumer.pull, 1, 0.0, timeout)
            timeout = None if end is None else max(0.0, end - monotonic())
        return message

    def batches(self, max_messages: int = 1_000, max_wait: Seconds = 0.0) -> Iterator[SyncBatch]:
        """Iterate over batches of what has arrived, waiting up to `max_wait` after the first for more."""
        batches = self._consumer.batches(max_messages, max_wait)
        while True:
            # A loop that was left early has had more taken than it came to.
            batch = SyncBatch(message for _ in range(max_messages) if (message := self._next()) is not None)
            if batch:
                yield batch
            elif not self._pull(batches.pull):
                return

    def ack(self, messages: Iterable[SyncMessage]) -> list[Outcome]:
        """Ack messages. Returns "settled" or "stale" for each, in the order given."""
        outcomes: list[Outcome] = self._call(self._consumer.ack, _inner(messages))
        return outcomes

    def nack(
        self,
        messages: Iterable[SyncMessage],
        delay: Seconds | None = None,
        *,
        until: datetime | None = None,
        reason: str | None = None,
    ) -> list[Outcome]:
        """Nack messages. Returns "settled" or "stale" for each, in the order given."""
        outcomes: list[Outcome] = self._call(
            self._consumer.nack, _inner(messages), delay, until=until, reason=reason
        )
        return outcomes

    def extend(
        self,
        messages: Iterable[SyncMessage],
        seconds: Seconds | None = None,
        *,
        until: datetime | None = None,
    ) -> list[Outcome]:
        """Extend leases from now. Returns "settled" or "stale" for each, in the order given."""
        outcomes: list[Outcome] = self._call(self._consumer.extend, _inner(messages), seconds, until=until)
        return outcomes

    def pause(self) -> None:
        """Stop deliveries at once; messages that the application does not have go back uncharged."""
        self._call(self._consumer.pause)

    def resume(self) -> None:
        """Resume deliveries after a pause."""
        self._call(self._consumer.resume)

    def _pull(self, pull: Callable[..., Awaitable[Batch]], *args: Any) -> bool:
        """Have more messages at hand; False if it is closed, by whomever."""
        return self._unless_closed(self._fill, pull, *args) is not None

    async def _fill(self, pull: Callable[..., Awaitable[Batch]], *args: Any) -> int:
        """On the loop: what is taken there is at hand even if a signal has ended the call that asked."""
        batch = await pull(*args)
        for block, start, stop in batch.spans:
            self._pulled.extend([(block, index) for index in range(start, stop)])
        return len(batch)

    def _unless_closed(self, work: Callable[..., Awaitable[T]], *args: Any) -> T | None:
        try:
            return self._call(work, *args)
        except ConnectionClosed:
            if not self._consumer.closed:
                raise
            return None

    def _next(self) -> SyncMessage | None:
        """Return the next message at hand that has not gone back."""
        consumer = self._consumer
        while True:
            try:
                place = block, index = self._pulled[0]
            except IndexError:
                return None
            handed = consumer.leases.hand(block, index)
            if not handed and block.gone is not None and block.states[index] == BUFFERED:
                # At most once it cannot go back: in a pause it waits.
                handed = bool(self._unless_closed(consumer.hand, Message(block, index, consumer.origin)))
            # Removed last: who is interrupted has lost nothing. Others may have come first.
            with suppress(ValueError):
                self._pulled.remove(place)
            if handed:
                return SyncMessage(Message(block, index, consumer.origin), self._bridge)


def _inner(messages: Iterable[SyncMessage]) -> list[Message]:
    if not isinstance(messages, Iterable):
        raise InvalidArgument(
            f"messages is {messages!r:.60}: use a list of messages, or settle one by itself"
        )
    inner = []
    for message in messages:
        if not isinstance(message, SyncMessage):
            raise InvalidArgument(
                f"{message!r:.60} is no message: use those that the consumer has handed out"
            )
        inner.append(message._message)
    return inner
