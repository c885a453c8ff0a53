"""A consumer as its worker sees it: who it is, and how much it may still be sent."""

from collections import Counter
from typing import Protocol

from keylane import wire
from keylane_broker.limits import MAX_PERMITS
from keylane_broker.worker.crowd import Crowd

FRAME = 250_000  # characters of messages in one frame, about
FETCH_BYTES = 1024 * 1024  # of messages for one consumer in one fetch
_FEW_PERMITS = 64  # below which a share of them is not worth its own call


class Outlet(Protocol):
    """A connection, as its consumers see it: a way to send frames, while the client reads them."""

    streams: dict[int, "Consumer"]
    writable: bool  # the client reads what it is sent

    @property
    def takes_more(self) -> bool:
        """Whether messages may be fetched for it."""

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame, with the others of this turn of the event loop."""

    def flush(self) -> None:
        """Write what was sent, now."""

    def begin_fetch(self) -> None:
        """A fetch is under way for consumers of it."""

    def end_fetch(self) -> None:
        """It has ended; allow_fetches() then says so."""

    def allow_fetches(self) -> None:
        """Fetches have ended: those that wait for their turn may go on."""


class Source(Protocol):
    """A dispatcher, as the consumers that it serves see it."""

    @property
    def failing(self) -> bool:
        """Whether its last attempt at anything has failed."""

    def notify(self) -> None:
        """There may be something that any consumer could take."""

    def may_have_work_for(self, consumer: "Consumer") -> None:
        """There may be something for a consumer."""

    def take_room(self, consumer: "Consumer") -> bool:
        """A consumer that waited for it has room; returns whether there may be something for it."""

    async def renew_sessions(self, session_ms: int) -> None:
        """Tell Redis that the consumers are still here."""

    def holds_nothing(self, consumer: "Consumer") -> None:
        """A consumer has no unsettled messages of the partition any more."""

    def detach(self, consumer: "Consumer") -> None:
        """Serve it no more."""


class Consumer:
    """One stream of deliveries on a connection, from any number of partitions."""

    __slots__ = (
        "at_most_once",
        "connection",
        "consumers",
        "credit",
        "crowd",
        "dispatchers",
        "gone",
        "incarnation",
        "lease_ms",
        "left",
        "listing",
        "lowered",
        "name",
        "out",
        "partitions",
        "passed_on",
        "paused",
        "permits",
        "place",
        "reserved",
        "stream",
        "subscription",
        "telling",
        "topic",
        "waiting",
        "wanted",
    )

    def __init__(
        self,
        connection: Outlet,
        consumers: "Consumers",
        crowd: Crowd["Consumer"],
        request: wire.Subscribe,
        lease_ms: int,
        incarnation: int,
    ) -> None:
        self.connection = connection
        self.consumers = consumers
        self.stream = request.stream
        self.topic = request.topic
        self.incarnation = incarnation  # of the topic
        self.subscription = request.subscription
        self.name = request.consumer
        self.lease_ms = lease_ms
        self.partitions: set[int] = set()
        self.left: set[int] = set()  # partitions that were open and are not
        self.permits = request.permits
        self.credit = request.permits  # permits that stand for no message right now
        self.reserved = 0  # permits that fetches under way may use
        self.out: Counter[int] = Counter()  # messages that are not settled, by partition
        self.gone = 0  # permits that went with partitions, ever
        self.lowered: list[int] = []  # sequences of FLOW frames that wait until no more than the limit is out
        self.wanted = False  # the client knows that there may be messages, but no permits
        self.paused = False
        self.telling = self.passed_on = (
            False  # those who wait hear that there is room; more has come back meanwhile
        )
        self.at_most_once = False  # nothing is settled: the client says when there is room again
        self.dispatchers: dict[int, Source] = {}  # by partition
        self.waiting: dict[int, Source] = {}  # partitions that may have something once there are permits
        self.place: tuple[int, int] | None = None  # in the crowd
        self.crowd = crowd
        # Partition -> token, first, last of leases that have ended since we asked what the name holds there.
        self.listing: dict[int, list[tuple[int, int, int]]] = {}

    @property
    def identity(self) -> tuple[str, str, str]:
        """What there is only one consumer of."""
        return self.topic, self.subscription, self.name

    @property
    def headroom(self) -> int:
        """How many more messages it could hold, of all partitions together."""
        return self.credit + self.reserved

    @property
    def rank(self) -> tuple[int, int]:
        """By which the roomiest is the least, and of equals the one whose turn it is."""
        return -self.headroom, self.place[1] if self.place else 0

    @property
    def has_room(self) -> bool:
        """Whether a fetch may name it now."""
        return self.credit > 0 and not self.paused and self.connection.takes_more

    @property
    def takes_turns(self) -> bool:
        """Whether it may be given messages that are just being published: few, and not read from the log."""
        return self.credit > 0 and not self.paused and self.connection.writable

    def reserve(self, most: int = MAX_PERMITS) -> int:
        """Take permits for a fetch, leaving some to the other partitions; what is not used comes back."""
        credit = self.credit
        share = min(max(min(credit, _FEW_PERMITS), credit // max(len(self.dispatchers), 1)), most)
        self.credit -= share
        self.reserved += share
        return share

    def reserve_some(self, most: int) -> int:
        """Take permits for a fetch that brings no more than so many messages."""
        share = min(self.credit, most)
        self.credit -= share
        self.reserved += share
        return share

    def want(self) -> None:
        """Let the client know that there may be messages, if it has given no permits."""
        if not self.permits and not self.wanted and not self.paused:
            self.wanted = True
            self.connection.send(wire.Flow(self.stream, wanted=True))

    def unreserve(self, permits: int, left: int) -> None:
        """A fetch has ended, with some of its permits left; give() then says so."""
        self.reserved -= permits
        self.credit = min(self.permits, self.credit + left)

    def give(self, permits: int) -> None:
        """Add permits, and let the partitions that wait for them know, another one first each time."""
        self.credit = min(self.permits, self.credit + permits)
        if self.lowered and self.credit >= 0:
            self._answer_lowered()
        if not self.has_room:
            return
        self.crowd.has_grown(self)
        if self.telling:  # who is told has come to an end at once: the next one hears below, not from there,
            self.passed_on = True  # since with many partitions that would be a deep stack
            return
        self.telling = True
        try:
            self._tell_those_who_wait()
        finally:
            self.telling = False

    def _tell_those_who_wait(self) -> None:
        while self.waiting and self.has_room:  # those who are told may use it up at once
            self.passed_on = False
            dispatcher = self.waiting.pop(next(iter(self.waiting)))
            wanted = dispatcher.take_room(self) and not self.passed_on
            # One whose Redis is away has no use for them yet.
            if wanted and self.credit < _FEW_PERMITS and len(self.dispatchers) > 1 and not dispatcher.failing:
                return

    def count(self, partition: int, messages: int) -> None:
        """Messages of a partition are out, for which no permits were reserved."""
        self.out[partition] += messages
        self.credit -= messages

    def recount(self, partition: int, messages: int) -> int:
        """Believe Redis how many messages of a partition are out; return how many more there seemed to be."""
        more = self.out[partition] - messages
        if more > 0:
            self.take_back(more, partition)
        elif more < 0:
            self.count(partition, -more)
        return more

    def ended(self, partition: int, parts: list[tuple[int, int, int]]) -> None:
        """Leases have ended that nobody has settled: the client is told, and there is room for others."""
        if partition in self.listing:
            self.listing[partition] += parts
            return
        permits = min(sum(last - first + 1 for _, first, last in parts), self.out[partition])
        listed = wire.pack([number for part in parts for number in part])
        self.connection.send(wire.Ended(self.stream, partition, permits), body=listed)
        self.take_back(permits, partition)

    def take_back(self, messages: int, partition: int | None) -> None:
        """Messages of a partition are settled, or have ended otherwise: there is room for others."""
        if partition is None and self.out:  # the client does not say
            partition = max(self.out, key=self.out.__getitem__)
        if partition is not None:
            messages = min(messages, self.out[partition])
            self.out[partition] -= messages
            if not self.out[partition] and (dispatcher := self.dispatchers.get(partition)):
                dispatcher.holds_nothing(self)
            self.give(messages)

    def limit(self, permits: int, sequence: int, gone: int) -> None:
        """Allow more or fewer unsettled messages; the client is answered once no more than that are out.

        `gone` is what the client knew to have gone with partitions: what has since is not for us any more.
        """
        permits = max(0, permits - max(0, self.gone - gone))
        self.credit += permits - self.permits
        self.permits = permits
        self.wanted = False
        self.lowered.append(sequence)
        self.give(0)
        self._ask_for_permits()

    def pause(self, paused: bool) -> None:
        """Send nothing more, or go on."""
        self.paused = paused
        self._ask_for_permits()

    def _ask_for_permits(self) -> None:
        """Have those who wait ask the client, if it has given none."""
        if not self.permits and not self.paused:
            for dispatcher in list(self.waiting.values()):
                dispatcher.may_have_work_for(self)

    def _answer_lowered(self) -> None:
        for sequence in self.lowered:
            self.connection.send(wire.Properties(), sequence)
        self.lowered.clear()

    def redirect(self, partition: int, address: str) -> None:
        """Another worker serves a partition from now on; what is held of it, and its permits, go there."""
        gone = self._drop(partition)
        left = max(0, self.permits - gone)  # none, where the limit has been lowered below what was out
        self.credit += gone - (self.permits - left)
        self.permits = left
        self.gone += gone
        self.connection.send(wire.Redirect(self.topic, partition, address, self.stream, gone))
        self.give(0)

    def reopen(self, partition: int) -> None:
        """Begin again with a partition: what is held of it will be listed, and counted, once more."""
        self.give(self._drop(partition))

    def _drop(self, partition: int) -> int:
        self.partitions.discard(partition)
        self.left.add(partition)
        dispatcher = self.dispatchers.pop(partition, None)
        if dispatcher is not None:
            dispatcher.detach(self)
        return self.out.pop(partition, 0)

    def deliver(
        self, data: wire.Data, ranges: list[int], flat: list[str], retries: list[int], kept: list[str | int]
    ) -> None:
        """Send messages, in as many frames as it takes to keep each of them small."""
        if sum(map(len, flat)) <= FRAME:
            self.connection.send(data, body=wire.pack((ranges, flat, retries, kept)))
            return
        entries = [
            entry
            for first, last in zip(ranges[::2], ranges[1::2], strict=True)
            for entry in range(first, last + 1)
        ]
        start, size = 0, 0
        for index in range(len(entries) + 1):
            size += sum(map(len, flat[index * 3 : index * 3 + 3]))
            if index == len(entries) or (size > FRAME and index > start):
                part = [entry for entry in entries[start:index] for _ in range(2)]
                body = wire.pack((part, flat[start * 3 : index * 3], retries, kept))
                self.connection.send(data, body=body)
                start, size = index, sum(map(len, flat[index * 3 : index * 3 + 3]))

    def end(self, code: str, message: str) -> None:
        """Tell the client that the consumer is no more, and forget it."""
        self.forget()
        self.connection.send(wire.Error(code, message, stream=self.stream))

    def forget(self) -> None:
        """Take it off every partition, its connection and the list of all; what it holds stays leased."""
        for dispatcher in self.dispatchers.values():
            dispatcher.detach(self)
        self.dispatchers.clear()
        self.consumers.remove(self)
        self._answer_lowered()
        streams = self.connection.streams
        if streams.get(self.stream) is self:
            del streams[self.stream]


class Consumers:
    """All consumers of a worker: of each name in a subscription, one."""

    def __init__(self) -> None:
        self._crowds: dict[tuple[str, str], Crowd[Consumer]] = {}  # by topic and subscription

    def get(self, topic: str, subscription: str, name: str) -> Consumer | None:
        """Return the consumer of a name, if it is here."""
        crowd = self._crowds.get((topic, subscription))
        return crowd.members.get(name) if crowd is not None else None

    def open(self, connection: Outlet, request: wire.Subscribe, lease_ms: int, incarnation: int) -> Consumer:
        """Make a consumer, which takes over from the one of its name."""
        crowd = self._crowds.setdefault((request.topic, request.subscription), Crowd())
        before = crowd.members.get(request.consumer)
        consumer = Consumer(connection, self, crowd, request, lease_ms, incarnation)
        crowd.add(consumer)
        connection.streams[consumer.stream] = consumer
        if before is not None:
            before.end("consumer_replaced", f"another connection took over as consumer {consumer.name!r}")
        return consumer

    def remove(self, consumer: Consumer) -> None:
        """Forget a consumer."""
        consumer.crowd.remove(consumer)
        place = (consumer.topic, consumer.subscription)
        if not consumer.crowd.members and self._crowds.get(place) is consumer.crowd:
            del self._crowds[place]
