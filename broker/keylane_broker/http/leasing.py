"""Consumers of those who come by HTTP: what is on lease between two requests, and what receipts stand for.

Messages come only while somebody waits for them: each worker may have out what is held of its partitions, and
as many more as requests ask for right now; what has come beyond that goes back uncharged. A consumer is kept
while there are requests, and for a while after the last of its messages.
"""

import asyncio
import base64
import binascii
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from time import monotonic
from typing import NamedTuple

from keylane import AsyncClient, BrokerError, Consumer, InvalidArgument, Message, Unavailable
from keylane.consume.block import HANDED, STALE
from keylane.consume.message import spans_of
from keylane.consume.options import MAX_PERMITS
from keylane.consume.receipts import GIVE_BACK
from keylane.types import Outcome

_AT_LEAST = 0.2  # seconds that a request waits: messages have to come first
_MORE = 0.002  # seconds to wait for more after the first
_LISTED = 2.0  # seconds in which what a consumer held elsewhere is known here
_SWEEP = 1.0  # seconds between two looks at what has ended
_IDLE = 60.0  # seconds that a consumer without messages is kept
DEFAULT = "http"  # the consumer of those who do not say which they are


_numbers = count(1)


class Receipt(NamedTuple):
    """What stands for a delivery: whose it was, and which."""

    consumer: str
    id: str
    token: int

    @property
    def text(self) -> str:
        """As callers have it: opaque to them, and fit for a URL."""
        joined = f"{self.consumer} {self.id} {self.token}".encode()
        return base64.urlsafe_b64encode(joined).rstrip(b"=").decode()


def parse(text: str) -> Receipt:
    """Read what a caller shows."""
    try:
        joined = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode()
        consumer, id, token = joined.split(" ")
        return Receipt(consumer, id, int(token))
    except (ValueError, binascii.Error):
        raise InvalidArgument(f"{text!r:.60} is no receipt: use those that lease has returned") from None


def _sent_before(one: Receipt, last: Receipt) -> bool:
    """Whether an event was sent no later than another; of those of another partition nobody can tell."""
    try:
        (where, place), (its, last_place) = (
            (partition, (receipt.token, *map(int, id.split("-"))))
            for receipt in (one, last)
            for partition, _, id in [receipt.id.partition(":")]
        )
    except ValueError:
        return False
    return where == its and place <= last_place


class HttpConsumer:
    """One consumer, as long as requests come for it."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.used = self._opened = monotonic()
        self.polls = 0
        self._held: dict[Receipt, Message] = {}  # in the order in which they were taken
        self._held_of: Counter[int] = Counter()  # how many of these, by partition
        self._numbers: dict[Receipt, int] = {}  # of those, and of the last ones before
        self._freed = asyncio.Event()  # something was settled since it was cleared
        self._wanted = 0

    @property
    def idle(self) -> bool:
        """Whether nobody has asked for a while, and nothing is out."""
        return not self.polls and not self._held and monotonic() - self.used > _IDLE

    async def lease(
        self, most: int, wait: float, lease: float | None, after: Receipt | None = None
    ) -> dict[Receipt, Message]:
        """Take messages; waits for the first of them. `after` is the last event that somebody has got."""
        self.polls += 1
        self._want(most)
        end = monotonic() + max(wait, _AT_LEAST)
        try:
            found: dict[Receipt, Message] = {}
            while not found and monotonic() < end:
                found = await self._take(most, end, after)
            if lease is not None and found:
                with self.handing_out(found):
                    await self.consumer.extend(found.values(), lease)
            return found
        finally:
            self.polls -= 1
            self._want(-most)
            self._give_back()

    async def _take(self, most: int, end: float, after: Receipt | None) -> dict[Receipt, Message]:
        """Take what has come; what a consumer of that name had before stays with who has it.

        Who names the last event that it has got has lost its stream, perhaps at another worker: it is sent
        what it had not got.
        """
        try:
            async with asyncio.timeout(max(0.0, end - monotonic())):
                batch = await self.consumer.take(most, _MORE)
        except TimeoutError:
            return {}
        except StopAsyncIteration:
            raise Unavailable("the worker is stopping") from None
        found = self._keep(batch)
        self.used = monotonic()
        return {
            receipt: one
            for receipt, one in found.items()
            if not one._block.held or (after is not None and not _sent_before(receipt, after))
        }

    def _keep(self, messages: Iterable[Message]) -> dict[Receipt, Message]:
        found = {Receipt(self.consumer.name, one.id, one.token): one for one in messages}
        for receipt, message in found.items():
            self._hold(receipt, message)
            self._numbers[receipt] = next(_numbers)
        while len(self._numbers) > 2 * MAX_PERMITS:
            del self._numbers[next(iter(self._numbers))]
        return found

    @contextmanager
    def handing_out(self, found: Iterable[Receipt]) -> Iterator[None]:
        """What cannot be handed out after all goes back uncharged: nobody has had it."""
        try:
            yield
        except BaseException:
            self.return_unseen(found)
            raise

    def return_unseen(self, receipts: Iterable[Receipt]) -> None:
        """Nobody has had these: they go back uncharged."""
        messages = [message for receipt in receipts if (message := self._drop(receipt))]
        unseen = [one for one in messages if one._block.states[one._index] == HANDED]
        self._freed.set()
        self._adjust()
        with suppress(BrokerError):  # it is closed, which gives back all that it holds
            self.consumer.origin.settler.submit(GIVE_BACK, spans_of(unseen, self.consumer.origin))

    async def next_events(
        self, permits: int, patience: float, after: Receipt | None
    ) -> dict[Receipt, Message]:
        """Take messages for somebody who may have so many unsettled; none if none come in time."""
        room = permits - len(self._held)
        if room > 0:
            return await self.lease(room, patience, None, after)
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._freed.wait()
        return {}

    def taken_after(self, event: Receipt) -> list[tuple[Receipt, Message]]:
        """Return what is held and was taken after an event: whoever names it as the last has not got them."""
        last = self._numbers.get(event, 0)
        return [pair for pair in self._held.items() if self._numbers.get(pair[0], 0) > last]

    async def settle(
        self,
        receipts: Sequence[Receipt],
        act: Callable[[list[Message]], Awaitable[list[Outcome]]],
        *,
        ends: bool,
    ) -> list[Outcome]:
        """Settle or extend what receipts stand for; what is not held is stale."""
        self.used = monotonic()
        places = [place for place, receipt in enumerate(receipts) if receipt in self._held]
        messages = [self._held[receipts[place]] for place in places]
        if ends:
            for place in places:
                self._drop(receipts[place])
            self._freed.set()
            self._adjust()  # before they are settled: nobody has asked for others in their place
        outcomes: list[Outcome] = ["stale"] * len(receipts)
        if messages:
            try:
                done = await act(messages)
            except BaseException:
                if ends:
                    self._hold_again(
                        {receipts[place]: one for place, one in zip(places, messages, strict=True)}
                    )
                raise
            for place, outcome in zip(places, done, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _hold_again(self, found: dict[Receipt, Message]) -> None:
        """They were not settled, as far as anybody knows: who asks once more is to get an answer."""
        for receipt, message in found.items():
            self._hold(receipt, message)
        self._held = dict(sorted(self._held.items(), key=lambda pair: self._numbers.get(pair[0], 0)))
        self._adjust()

    async def know(self, receipts: Sequence[Receipt]) -> None:
        """Wait until what a consumer of this name holds is known, for a while after it was opened here."""
        end = self._opened + _LISTED
        while not all(receipt in self._held for receipt in receipts) and monotonic() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(end - monotonic()):
                    batch = await self.consumer.pull(MAX_PERMITS)
                    held = [message for message in batch if message._block.held]
                    self._keep([message for message in held if await self.consumer.hand(message)])
                    self.consumer.give_back([span for span in batch.spans if not span[0].held])

    def sweep(self) -> None:
        """Let go of what has ended otherwise, and of what nobody has asked for."""
        if self._forget_ended():
            self._freed.set()
            self._adjust()
        self._give_back()

    def _forget_ended(self) -> bool:
        """Whoever moved, purged or skipped has ended leases, a nack those behind it, and time the others."""
        now = monotonic()
        ended = [
            receipt
            for receipt, message in self._held.items()
            if message._block.states[message._index] == STALE
            or self.consumer.leases.deadline(message._block, message._index) < now
        ]
        for receipt in ended:
            self._drop(receipt)
        return bool(ended)

    def _hold(self, receipt: Receipt, message: Message) -> None:
        if receipt not in self._held:
            self._held_of[message.partition] += 1
        self._held[receipt] = message

    def _drop(self, receipt: Receipt) -> Message | None:
        """Hold something no longer, if it is held; returns what that was."""
        message = self._held.pop(receipt, None)
        if message is not None:
            self._held_of[message.partition] -= 1
            if not self._held_of[message.partition]:
                del self._held_of[message.partition]
        return message

    def _give_back(self) -> None:
        """Let others have what nobody here has asked for."""
        if not self.polls:
            self.consumer.give_back()

    def _want(self, by: int) -> None:
        self._wanted += by
        self._adjust()

    def _adjust(self) -> None:
        self.consumer.offer_permits(self._held_of, self._wanted)


Act = Callable[[Consumer, list[Message]], Awaitable[list[Outcome]]]  # settles messages, or extends leases
Place = tuple[str, str, str]  # topic, subscription, name of the consumer


class Leasing:
    """All consumers of a worker that have come by HTTP."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        """`name` is that of the worker, for those who do not say who they are."""
        self._client = client
        self._name = f"{DEFAULT}-{name}"
        self._consumers: dict[Place, asyncio.Task[HttpConsumer]] = {}

    def name_of(self, consumer: str | None) -> str:
        """Return the name of a consumer, for one that has not said it."""
        return consumer or self._name

    async def lease(
        self, topic: str, subscription: str, consumer: str | None, most: int, wait: float, lease: float | None
    ) -> tuple[HttpConsumer, dict[Receipt, Message]]:
        """Lease messages to a consumer, which is opened if need be; returns both."""
        one = await self.open(topic, subscription, self.name_of(consumer), most)
        return one, await one.lease(most, wait, lease)

    async def settle(
        self,
        topic: str,
        subscription: str,
        consumer: str,
        receipts: Sequence[Receipt],
        act: Act,
        *,
        ends: bool = True,
    ) -> list[Outcome]:
        """Do something with what receipts of a consumer stand for; says for each what became of it."""
        one = await self.open(topic, subscription, consumer, 1)
        await one.know(receipts)
        return await one.settle(receipts, lambda messages: act(one.consumer, messages), ends=ends)

    async def open(self, topic: str, subscription: str, name: str, permits: int) -> HttpConsumer:
        """Return the consumer of a name; all who ask at once share one attempt to open it."""
        place = (topic, subscription, name)
        opening = self._consumers.get(place)
        if opening is None or (opening.done() and self._has_ended(opening)):
            opening = self._consumers[place] = asyncio.create_task(self._open(place, permits))
        try:
            return await asyncio.shield(opening)
        except BrokerError:
            if self._consumers.get(place) is opening:
                del self._consumers[place]
            raise

    @staticmethod
    def _has_ended(opening: "asyncio.Task[HttpConsumer]") -> bool:
        if opening.cancelled() or opening.exception() is not None:
            return True
        consumer = opening.result().consumer
        return consumer.closed or consumer.error is not None

    async def _open(self, place: Place, permits: int) -> HttpConsumer:
        topic, subscription, name = place
        await self._client.describe_subscription(topic, subscription)  # a name misspelt must not make one
        consumer = self._client.subscribe(
            topic, subscription, mode=None, name=name, permits=permits, auto_extend=False
        )
        await consumer.__aenter__()
        return HttpConsumer(consumer)

    async def run(self) -> None:
        """Let go of what has ended, for ever."""
        while True:
            await asyncio.sleep(_SWEEP)
            for place, opening in list(self._consumers.items()):
                if not opening.done():
                    continue
                if self._has_ended(opening):
                    del self._consumers[place]
                    continue
                one = opening.result()
                one.sweep()
                await asyncio.sleep(0)  # others have their turn: it has looked at all that is held
                if one.idle:
                    del self._consumers[place]
                    await one.consumer.close()

    async def close(self) -> None:
        """Give everything back."""
        openings, self._consumers = list(self._consumers.values()), {}
        for opening in openings:
            opening.cancel()
        found = await asyncio.gather(*openings, return_exceptions=True)
        await asyncio.gather(*(one.consumer.close() for one in found if isinstance(one, HttpConsumer)))
