"""A plain model of one partition: what the delivery contract says, with lists and dicts.

Where the contract leaves a choice (which free lane goes to which consumer first), the model does not
predict: it checks the answer against the rules and follows it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

import msgspec

from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import (
    Backoff,
    Capacity,
    Delivery,
    FetchResult,
    Outgoing,
    Published,
    Receipt,
)

PARKED = 10**14 - 1  # the due of what waits until somebody lets its lane go on
NONE_YET = "0-0"  # instead of the id of a message that waits for its time
Part = tuple[int, int]  # the place of a receipt in a call, and an entry that was stale in it


@dataclass(frozen=True)
class Entry:
    """A message in the log."""

    number: int
    id: str
    key: str
    uid: str
    about: str


@dataclass
class Claim:
    """A consumer's timed lease; all leased messages of a lane share one."""

    consumer: str
    lease_ms: int
    deadline: int


@dataclass
class Owed:
    """A message that a subscription has not settled; `lane` is "" where there is no order."""

    entry: Entry
    lane: str
    retries: int = 0
    due: int = 0
    claim: Claim | None = None
    token: int = 0


@dataclass
class Subscription:
    """One subscription of the partition."""

    mode: str
    backoff: Backoff | None = None
    max_retries: int | None = None
    parks: bool = False
    dead: list[tuple[int, int]] = field(default_factory=list)  # entry and retries of those that failed now
    parked: dict[str, int] = field(default_factory=dict)  # lane -> the entry at which it has stopped
    owed: dict[int, Owed] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)  # consumer -> newest token when it was charged
    # Consumer -> when to look at its leases: the earliest deadline it had, also of what is settled by now.
    looks: dict[str, int] = field(default_factory=dict)
    active: str | None = None
    filter: Filter = field(default_factory=Filter)
    wishes: dict[str, str] = field(default_factory=dict)  # lane of a moved key -> who is to get it next
    postponed: dict[str, int] = field(default_factory=dict)  # such a lane -> until when it may wait for that
    sparse: int = 0  # the last entry before which some may be missing
    begins: int = 1  # the first entry that it was owed when it was made or moved last
    letters: set[int] = field(default_factory=set)  # what has become dead letters since then
    expired: set[int] = field(default_factory=set)  # before anybody had them

    def wants(self, key: str, about: str) -> bool:
        """Whether a message is for it; `about` as its producer or as the log has it."""
        if self.filter.keys is not None and not fnmatchcase(key, self.filter.keys):
            return False
        text = about[about.index("{") :] if "{" in about else "{}"
        attributes = msgspec.json.decode(text, type=dict[str, str])
        return all(
            name in attributes and value in (None, attributes[name])
            for name, value in (self.filter.filter or {}).items()
        )

    def owe(self, entry: Entry) -> None:
        """Take on a message, which comes after all that are owed already, if it is one for it."""
        if not self.wants(entry.key, entry.about):
            return
        lane = "="
        if self.mode == "shared" or (self.mode == "key_shared" and not entry.key):
            lane = ""
        elif self.mode == "key_shared":
            lane += entry.key
        self.owed[entry.number] = Owed(entry, lane)

    def seek(self, entries: Iterable[Entry]) -> None:
        """Start anew with these messages; sessions stay."""
        self.owed.clear()
        self.holds.clear()
        self.parked.clear()
        self.looks.clear()
        self.letters.clear()
        for entry in entries:
            self.owe(entry)

    # Consumers

    def is_open(self, consumer: str, now: int) -> bool:
        """Whether a consumer has a session."""
        return self.sessions.get(consumer, 0) > now

    def join(self, now: int, consumer: str, session_ms: int) -> bool:
        """Open a session; True if it was open."""
        was_open = self.is_open(consumer, now)
        for other in list(self.sessions):
            if not self.is_open(other, now) and (other == consumer or self.mode == "exclusive"):
                self.crash(now, other)
        self.sessions[consumer] = now + session_ms
        return was_open

    def leave(self, now: int, consumer: str) -> None:
        """Give back all that a consumer holds; nobody is charged."""
        self._give_up(now, consumer, charged=[])

    def crash(self, now: int, consumer: str) -> None:
        """Give back all that a consumer holds; the oldest is charged, and each lane's oldest."""
        mine = self.leased_to(consumer)
        heads = {owed.lane: owed for owed in reversed(mine)}
        self._give_up(now, consumer, list(heads.values()))

    def _give_up(self, now: int, consumer: str, charged: list[Owed]) -> None:
        self._return(self.leased_to(consumer), now)
        for owed in charged:
            if self._charge(now, owed, now) is None:
                self._fail(now, owed)
        self.sessions.pop(consumer, None)
        self.charged.pop(consumer, None)
        self.looks.pop(consumer, None)
        if self.active == consumer:
            self.active = None

    # What is leased, and what waits

    def leased(self) -> list[Owed]:
        """All that is leased, oldest first."""
        return [owed for owed in self.owed.values() if owed.claim]

    def leased_to(self, consumer: str) -> list[Owed]:
        """What a consumer holds, oldest first."""
        return [owed for owed in self.owed.values() if owed.claim and owed.claim.consumer == consumer]

    def lane(self, name: str) -> list[Owed]:
        """The unsettled messages of an ordered lane, in publish order."""
        assert name
        return [owed for owed in self.owed.values() if owed.lane == name]

    def leased_of(self, name: str) -> list[Owed]:
        """What is leased of an ordered lane: always a prefix, all of it under one claim."""
        lane = self.lane(name)
        prefix = list(takewhile(lambda owed: owed.claim, lane))
        assert all(owed.claim is None for owed in lane[len(prefix) :]), f"{name}: not a prefix"
        assert len({id(owed.claim) for owed in prefix}) < 2, f"{name}: held twice"
        return prefix

    def takers(self, owed: Owed, consumers: Iterable[str]) -> list[str]:
        """Who of the consumers may get a message that is due, as far as others' leases go."""
        if owed.claim:
            return []
        if owed.lane:
            prefix = self.leased_of(owed.lane)
            if self.lane(owed.lane)[len(prefix)] is not owed:
                return []  # there are others before it
            if prefix and prefix[0].claim:
                return [name for name in consumers if name == prefix[0].claim.consumer]
        return list(consumers)

    def due_of(self, owed: Owed) -> int:
        """When a message that is not leased may be served."""
        return self.holds.get(owed.lane, 0) if owed.lane else owed.due

    def next_end(self) -> int:
        """When leases are to be looked at, or a session ends; 0 for never."""
        return min([*self.looks.values(), *self.sessions.values()], default=0)

    def _look(self, claim: Claim) -> None:
        self.looks[claim.consumer] = min(claim.deadline, self.looks.get(claim.consumer, claim.deadline))

    def _return(self, messages: list[Owed], due: int) -> None:
        for owed in messages:
            owed.claim = None
            owed.due = due
            if owed.lane:
                self.holds[owed.lane] = max(due, self.holds.get(owed.lane, 0))

    def _charge(self, now: int, owed: Owed, due: int | None) -> int | None:
        """Raise a retry count; answers when the message is due again, None if it has no retry left."""
        owed.retries += 1
        if self.max_retries is not None and owed.retries > self.max_retries:
            return None
        if due is not None:
            return due
        if self.backoff is None:
            return now
        wait = self.backoff.initial * self.backoff.factor ** (owed.retries - 1)
        return now + int(1000 * min(wait, self.backoff.maximum))

    def _fail(self, now: int, owed: Owed) -> None:
        """A message that is back has no retry left: its lane stops there, or it is a dead letter."""
        number = owed.entry.number
        if not self.parks:
            self.dead.append((number, owed.retries - 1))
            del self.owed[number]
            return
        owed.due = PARKED
        self.parked[owed.lane or f"#{number}"] = number
        if owed.lane:
            self.holds[owed.lane] = PARKED

    def unpark(self, now: int, lane: str, action: str) -> None:
        """Let a lane go on, with the message at which it has stopped or without it."""
        number = self.parked.pop(lane)
        owed = self.owed[number]
        owed.due = now
        if owed.lane:
            self.holds[owed.lane] = now
        if action == "resume":
            owed.retries = 0
        else:
            self.dead.append((number, owed.retries - 1))
            del self.owed[number]

    # Delivery

    def fetch(
        self, now: int, rooms: Sequence[Capacity], limit: int, result: FetchResult, newest_token: int
    ) -> None:
        """Check what a fetch answered, and follow it."""
        known = [room for room in rooms if self.is_open(room.consumer, now)]
        closed = [room.consumer for room in rooms if room not in known]
        assert result.unknown_consumers == closed, f"without a session: {closed}"
        assert result.now_ms == now
        if self.mode == "failover" and known:
            roomy = [room.consumer for room in known if room.permits > 0]
            self.active = self.active or next(iter(roomy), None)
            known = [room for room in known if room.consumer == self.active]
        spare = {room.consumer: room.permits for room in known}
        capacity = {room.consumer: room.permits if room.spare is None else room.spare for room in known}
        lease_ms = {room.consumer: room.lease_ms for room in known}

        self.wishes = {lane: who for lane, who in self.wishes.items() if self.is_open(who, now)}
        self.postponed |= dict.fromkeys(self.wishes, now + 250)
        tokens = {delivery.receipt.token for delivery in result.deliveries}
        assert len(tokens) < 2, f"several tokens in one call: {tokens}"
        assert all(token > newest_token for token in tokens), f"{tokens} after {newest_token}"
        assert sum(len(delivery.messages) for delivery in result.deliveries) <= limit
        before = None
        for delivery in result.deliveries:
            assert delivery.consumer in spare, f"{delivery.consumer} is not served"
            goes_on = before is not None and self._goes_on(now, before, delivery)
            self._deliver(now, delivery, spare, capacity, lease_ms[delivery.consumer], goes_on)
            before = delivery
        if not result.more:
            self._check_nothing_was_left(now, spare, result.next_due_ms)

    def _goes_on(self, now: int, before: Delivery, delivery: Delivery) -> bool:
        """Whether a consumer goes on, without order, with what can be had next: then nobody is chosen."""
        last, first = before.receipt.last, delivery.receipt.first
        return (
            delivery.consumer == before.consumer
            and not (delivery.receipt.lane or before.receipt.lane)
            and last < first
            and not any(
                last < number < first and not owed.claim and self.due_of(owed) <= now
                for number, owed in self.owed.items()
            )
        )

    def _deliver(
        self,
        now: int,
        delivery: Delivery,
        spare: dict[str, int],
        capacity: dict[str, int],
        lease_ms: int,
        goes_on: bool,
    ) -> None:
        _, lane, token, first, last = delivery.receipt
        claim = None
        if lane:
            claim = next((owed.claim for owed in self.leased_of(lane)), None)
        if claim is None and lane in self.wishes:
            assert delivery.consumer == self.wishes.pop(lane), f"{lane} was moved to another one"
        elif claim is None and not goes_on:
            most = max(capacity[consumer] for consumer, permits in spare.items() if permits > 0)
            assert capacity[delivery.consumer] == most, (
                f"{lane or first} was free and went to {delivery.consumer}, of {capacity}"
            )
        assert len(delivery.messages) == last - first + 1, "the messages of the receipt are there"
        for number, message in zip(range(first, last + 1), delivery.messages, strict=True):
            assert number in self.owed, f"{number} is not owed"
            owed = self.owed[number]
            assert owed.claim is None, f"{number} is leased already"
            assert owed.lane == lane, f"{number} is of lane {owed.lane!r}, not {lane!r}"
            assert self.due_of(owed) <= now, f"{number} is not due before {self.due_of(owed)}"
            assert delivery.consumer in self.takers(owed, spare), f"{number} jumps its lane"
            stored = (owed.entry.id, owed.entry.key, owed.entry.uid, owed.entry.about, owed.retries)
            told = (message.id, message.key, message.uid, message.about, message.retries)
            assert told == stored, "the message and how often it was charged"
            if claim is None or not lane:
                claim = Claim(delivery.consumer, lease_ms, now + lease_ms)
                self._look(claim)
            assert delivery.deadline_ms == claim.deadline, f"deadline of {number}"
            owed.claim = claim
            owed.token = token
        spare[delivery.consumer] -= len(delivery.messages)
        capacity[delivery.consumer] -= len(delivery.messages)
        assert spare[delivery.consumer] >= 0, f"{delivery.consumer} has no permits for this"

    def _check_nothing_was_left(self, now: int, spare: dict[str, int], next_due_ms: int) -> None:
        roomy = [consumer for consumer, permits in spare.items() if permits > 0]
        events = [self.next_end()] if self.next_end() else []
        self.postponed = {lane: until for lane, until in self.postponed.items() if until > now}
        for number, owed in self.owed.items():
            if owed.lane in self.postponed:
                continue
            if takers := self.takers(owed, roomy):
                due = self.due_of(owed)
                assert due > now, f"{number} was left behind, and {takers} had room"
                events += [due] if due < PARKED else []
        if not self.postponed:
            assert next_due_ms == min(events, default=0), "when to look again"

    # Settling

    def holding(self, receipt: Receipt) -> list[Owed]:
        """What a receipt still holds."""
        _, lane, token, first, last = receipt
        numbers = [number for number in range(first, last + 1) if number in self.owed]
        return [
            owed
            for owed in map(self.owed.__getitem__, numbers)
            if owed.claim and owed.lane == lane and owed.token == token
        ]

    def ack(self, now: int, receipts: Sequence[Receipt]) -> set[Part]:
        """Settle messages; answers what was stale."""
        stale: set[Part] = set()
        lanes = set()
        for index, receipt in enumerate(receipts):
            held = self.holding(receipt)
            stale |= _missing(index, receipt, held)
            for owed in held:
                del self.owed[owed.entry.number]
                lanes.add(owed.lane)
        self._restart(now, lanes)
        return stale

    def skip(self, now: int, numbers: Iterable[int]) -> list[int]:
        """Settle messages, whoever holds them; answers which of them were owed."""
        found = [number for number in numbers if number in self.owed]
        for number in found:
            owed = self.owed.pop(number)
            lane = owed.lane or f"#{number}"
            if self.parked.get(lane) == number:
                del self.parked[lane]  # it goes on with what is behind
            if owed.claim:
                self._restart(now, [owed.lane])
            elif owed.lane and not any(
                one.entry.number < number and not one.claim for one in self.lane(owed.lane)
            ):
                self.holds.pop(owed.lane, None)  # what it waited for is nothing to those behind it
        return found

    def nack(self, now: int, receipts: Sequence[Receipt], due: int | None, charged: bool) -> set[Part]:
        """Give messages back, of a lane the earliest one and all after it; answers what was stale."""
        stale: set[Part] = set()
        heads: dict[str, Owed] = {}
        for index, receipt in enumerate(receipts):
            held = self.holding(receipt)
            stale |= _missing(index, receipt, held)
            for owed in held:
                if not owed.lane:
                    self._go_back(now, owed, [owed], due, charged)
                elif owed.lane not in heads or owed.entry.number < heads[owed.lane].entry.number:
                    heads[owed.lane] = owed
        for lane, head in heads.items():
            later = [o for o in self.leased_of(lane) if o.entry.number >= head.entry.number]
            self._go_back(now, head, later, due, charged)
        self._restart(now, heads)
        return stale

    def _go_back(self, now: int, head: Owed, messages: list[Owed], due: int | None, charged: bool) -> None:
        """Take messages back, of which the first is charged, or none."""
        again = self._charge(now, head, due) if charged else due
        failed = charged and again is None
        self._return(messages, now if again is None else again)
        if failed:
            self._fail(now, head)

    def extend(self, receipts: Sequence[Receipt], deadline: int) -> set[Part]:
        """Move deadlines; answers what was stale."""
        stale: set[Part] = set()
        for index, receipt in enumerate(receipts):
            held = self.holding(receipt)
            stale |= _missing(index, receipt, held)
            for owed in held:
                assert owed.claim
                owed.claim.deadline = deadline
                self._look(owed.claim)
        return stale

    def expire(self, now: int, newest_token: int) -> set[str]:
        """Give back what the consumers that are gone held, then what has timed out; answers those gone.

        A timeout charges the head of a lane. Without order it charges the oldest that the consumer holds,
        once for all that was leased to it by then.
        """
        gone = {name for name, end in self.sessions.items() if end <= now}
        for consumer in gone:
            self.crash(now, consumer)
        late = [owed for owed in self.owed.values() if owed.claim and owed.claim.deadline <= now]
        for owed in late:
            if owed.lane and owed.claim:  # the head: the rest goes back with it
                self._go_back(now, owed, self.leased_of(owed.lane), None, True)
            elif owed.claim and owed.token > self.charged.get(owed.claim.consumer, 0):
                self.charged[owed.claim.consumer] = newest_token
                self._go_back(now, owed, [owed], None, True)
            elif owed.claim:
                self._return([owed], now)
        for consumer in [consumer for consumer, look in self.looks.items() if look <= now]:
            del self.looks[consumer]
            for claim in [owed.claim for owed in self.leased_to(consumer) if owed.claim]:
                self._look(claim)
        return gone

    def _restart(self, now: int, lanes: Iterable[str]) -> None:
        """A settle in a lane gives what is still leased of it the whole time again, if it has less."""
        for lane in lanes:
            for owed in self.leased_of(lane) if lane else []:
                assert owed.claim
                owed.claim.deadline = max(owed.claim.deadline, now + owed.claim.lease_ms)


@dataclass
class Partition:
    """A partition: its log, its subscriptions, and the uids that it has seen."""

    dedupe_ms: int
    last: int = 0
    log: dict[int, Entry] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)
    waiting: list[tuple[int, Outgoing]] = field(default_factory=list)  # for later: when each is due
    doomed: list[str] = field(default_factory=list)  # names of bodies of messages that have gone
    retention_ms: int = 0  # for which messages stay when everybody has settled them
    quota: int = 0  # messages that may be there, or wait for their time; 0 for no limit
    quota_bytes: int = 0  # that bodies of the log may have; 0 for no limit
    clock: Callable[[], int] = lambda: 0
    settled: dict[int, int] = field(default_factory=dict)  # what stays -> since when it is owed to nobody
    expiries: dict[int, int] = field(default_factory=dict)  # entry -> when it expires
    priorities: dict[int, int] = field(default_factory=dict)  # entry -> priority, of those that have one
    expired_for: set[tuple[str, int]] = field(
        default_factory=set
    )  # subscription, also a former one, and entry
    noted: list[tuple[int, str]] = field(default_factory=list)  # dead letters that are not on their way yet
    held: list[tuple[int, str]] = field(default_factory=list)  # entries whose bodies dead letters have
    sent: list[tuple[str, int, int]] = field(default_factory=list)  # subscription, entry, retries

    def publish(
        self, now: int, epoch: int, messages: Sequence[tuple[str, str, str]], told: list[Published]
    ) -> None:
        """Check what a publish answered, and follow it."""
        assert len(told) == len(messages)
        if self.quota or self.quota_bytes:
            self.forget()
        used, full = sum(_size(entry.about) for entry in self.log.values()), False
        for (key, uid, about), answer in zip(messages, told, strict=True):
            if uid in {later.uid for _, later in self.waiting}:
                assert answer == Published(NONE_YET, duplicate=True), "it waits, however long"
            elif uid in self.marks and self._is_duplicate(now, uid, answer):
                assert answer == Published(self.marks[uid][1], duplicate=True), "the first id"
            elif not self.retention_ms and not any(
                one.wants(key, about) for one in self.subscriptions.values()
            ):
                assert answer == Published(None, no_subscribers=True), "nobody is there to owe it"
            elif self.quota and (full or len(self.log) + len(self.waiting) >= self.quota):
                assert answer == Published(None, full=True), f"{len(self.log)} messages are there"
                full = True
            elif self.quota_bytes and (full or 0 < used > self.quota_bytes - _size(f"{now} {about}")):
                assert answer == Published(None, full=True), f"{used} bytes are there, {about!r} does not fit"
                full = True
            else:
                used += _size(f"{now} {about}")
                self.last += 1
                entry = Entry(self.last, f"{epoch}-{self.last}", key, uid, f"{now} {about}")
                assert answer == Published(entry.id), "ids are dense"
                self.log[entry.number] = entry
                self.marks[uid] = (now, entry.id)
                for subscription in self.subscriptions.values():
                    subscription.owe(entry)

    def _is_duplicate(self, now: int, uid: str, answer: Published) -> bool:
        """Certain within the window; soon after it both answers are right."""
        age = now - self.marks[uid][0]
        if age < self.dedupe_ms:
            return True
        return answer.duplicate and age < 3 * self.dedupe_ms

    def entries_from(self, position: str | int) -> list[Entry]:
        """What a subscription owes that starts at a position."""
        if position == "latest":
            return []
        first = 0 if position == "earliest" else int(position)
        return [entry for entry in self.log.values() if entry.number >= first]

    def first_from(self, position: str | int) -> int:
        """The first entry that a subscription is owed which starts at a position."""
        oldest = min(self.log, default=self.last + 1)
        if isinstance(position, int):
            return max(oldest, min(position, self.last + 1))
        return oldest if position == "earliest" else self.last + 1

    def note_dead(self, name: str) -> None:
        """Take over what has become a dead letter in a subscription."""
        for number, retries in self.subscriptions[name].dead:
            self.noted.append((number, name))
            self.subscriptions[name].letters.add(number)
            self.sent.append((name, number, retries))
        self.subscriptions[name].dead.clear()

    def bury(self) -> None:
        """Send dead letters on their way: what nobody else is owed leaves the log, the body goes along."""
        noted, self.noted = self.noted, []
        assert {number for number, _ in noted} <= self.log.keys(), "they wait there until they are sent"
        numbers = [number for number, _ in noted]
        owed = {number for one in self.subscriptions.values() for number in one.owed}
        owed |= {number for number, _ in self.held} | {n for n in numbers if numbers.count(n) > 1}
        for number, name in noted:
            if number not in owed and not self.retention_ms:
                del self.log[number]
            elif self._has_body(self.log[number]):
                self.held.append((number, name))

    def bury_before(self, numbers: Iterable[int]) -> None:
        """Entries are to leave the log, whoever is owed them: after dead letters, if any are of these."""
        if self.noted and {number for number, _ in [*self.held, *self.noted]}.intersection(numbers):
            self.bury()

    def _has_body(self, entry: Entry) -> bool:
        return bool("".join(entry.about.split(" ")[3:4]))

    def forget(self) -> set[int]:
        """Drop the entries that nobody owes any more; answers their numbers."""
        owed = {number for one in self.subscriptions.values() for number in one.owed}
        owed |= {number for number, _ in self.held} | {number for number, _ in self.noted}
        gone = self.log.keys() - owed
        if self.retention_ms:
            self.settled = {number: self.settled.get(number, self.clock()) for number in sorted(gone)}
            return set()
        for number in sorted(gone):
            self.doom(self.log.pop(number))
        return gone

    def expired(self) -> set[int]:
        """What has expired by now, ever."""
        return {number for number, at in self.expiries.items() if at <= self.clock()}

    def expire_messages(self) -> None:
        """Settle what has expired and is not leased; a lane whose first it was goes on."""
        gone = self.expired() & self.log.keys() - self.leased()
        self.bury_before(gone)
        for number in sorted(self.expired()):
            for name, subscription in self.subscriptions.items():
                owed = subscription.owed.get(number)
                if owed is None or owed.claim:
                    continue
                if owed.lane and subscription.lane(owed.lane)[len(subscription.leased_of(owed.lane))] is owed:
                    subscription.holds.pop(owed.lane, None)
                if subscription.parked.get(owed.lane or f"#{number}") == number:
                    del subscription.parked[owed.lane or f"#{number}"]  # it goes on with what is behind
                del subscription.owed[number]
                subscription.expired.add(number)
                self.expired_for.add((name, number))
        self.drop(sorted(gone & self.log.keys()))

    def leased(self) -> set[int]:
        """What anybody has leased."""
        return {owed.entry.number for one in self.subscriptions.values() for owed in one.leased()}

    def trim(self) -> set[int]:
        """Drop what has stayed for long enough; answers its numbers."""
        now = self.clock()
        gone = {number for number, since in self.settled.items() if since + self.retention_ms <= now}
        for number in sorted(gone):
            self.doom(self.log.pop(number))
            del self.settled[number]
        return gone

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove messages that nobody is owed any more, and that are not to stay either."""
        bodies_held = {number for number, _ in self.held}
        for number in numbers:
            entry = self.log.pop(number)
            if number not in bodies_held:
                self.doom(entry)
            self.settled.pop(number, None)

    def doom(self, entry: Entry) -> None:
        """A message goes: if it has a body, that is to be deleted."""
        self.doomed += [entry.uid] if self._has_body(entry) else []


def _size(about: str) -> int:
    """The bytes of a body, as `about` has them in the log."""
    return int("".join(about.split(" ")[3:4]).partition(":")[0] or 0)


def _missing(index: int, receipt: Receipt, held: list[Owed]) -> set[Part]:
    asked = set(range(receipt.first, receipt.last + 1))
    return {(index, number) for number in asked - {owed.entry.number for owed in held}}
