"""An independent record of what applications were told, and the rules that it must follow."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from keylane import Published
from keylane.types import Mode, Outcome

ORDERED, SHARED = "ordered", "shared"
MODES: dict[str, Mode] = {ORDERED: "key_shared", SHARED: "shared"}

Name = tuple[str, int]  # of a message: its producer, and that one's count


class Delivered(Protocol):
    """What a consumer sees of a message that is looked at here."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str | None: ...

    @property
    def uid(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def retry_count(self) -> int: ...

    @property
    def attributes(self) -> Mapping[str, str]: ...


@dataclass
class Lane:
    """What one subscription keeps in order: a key, or a whole partition in exclusive and failover."""

    entries: dict[Name, int] = field(default_factory=dict)  # of all that is known
    unsettled: dict[int, Name] = field(default_factory=dict)  # what certainly nobody has settled
    consumer: str = ""
    run: set[int] = field(default_factory=set)  # what that one got, since the last rewind
    last: int = 0  # the last one it got
    newest: int = 0  # the largest that ever came


@dataclass
class Told:
    """What the consumers of one subscription were told."""

    delivered: set[Name] = field(default_factory=set)
    settled: set[Name] = field(default_factory=set)
    asking: Counter[Name] = field(default_factory=Counter)  # acks without an answer so far
    doubtful: set[Name] = field(default_factory=set)  # "stale", but an earlier answer may have been lost
    stale: set[Name] = field(default_factory=set)
    redelivered: int = 0


class Recorder:
    """Notes what producers and consumers see, and collects what must not be.

    `modes` are those of the subscriptions, by name.
    """

    def __init__(self, modes: Mapping[str, Mode] = MODES) -> None:
        self.problems: list[str] = []
        self.crashes = 0
        self.now: float | None = None  # the time of what is noted, where that was earlier
        self._began = monotonic()
        self._journal: dict[Name, list[str]] = defaultdict(
            list
        )  # what happened to each, to explain a problem
        self.answered: dict[Name, Published] = {}
        self.told = {subscription: Told() for subscription in modes}
        self._modes = modes
        self._keys: dict[Name, str] = {}
        self._ids: dict[str, tuple[Name, str]] = {}  # id -> message and its uid
        self._id_of: dict[Name, str] = {}
        self._lanes: dict[tuple[str, str], Lane] = defaultdict(Lane)

    # Producers

    def publishing(self, name: Name, key: str) -> None:
        """A message is about to be published."""
        self._keys[name] = key

    def published(self, name: Name, answer: Published) -> None:
        """Its publish was answered."""
        if answer.id is None:
            self.problems.append(f"{name} was answered without an id")
            return
        self.answered[name] = answer
        self._note(name, f"answered as {answer.id}, duplicate {answer.duplicate}")
        self._identify(name, answer.id, answer.uid)

    def _identify(self, name: Name, id: str, uid: str) -> None:
        """A message has one id and one uid, and no other message has either."""
        if self._ids.setdefault(id, (name, uid)) != (name, uid):
            self.problems.append(f"{id} is {self._ids[id]} and also {(name, uid)}")
        if self._id_of.setdefault(name, id) != id:
            self.problems.append(f"{name} was stored twice, as {self._id_of[name]} and as {id}")
        for subscription in self._modes:
            lane = self._lane(subscription, name)
            if lane is not None and name not in lane.entries:
                entry = lane.entries[name] = int(id.rpartition("-")[2])
                lane.unsettled[entry] = name

    def _lane(self, subscription: str, name: Name) -> Lane | None:
        """The lane of a message whose id is known, None if it has no order."""
        mode = self._modes[subscription]
        if mode == "shared":
            return None
        key = self._keys[name] if mode == "key_shared" else self._id_of[name].partition(":")[0]
        return self._lanes[subscription, key] if key else None

    # Consumers

    def delivered(self, subscription: str, consumer: str, message: Delivered) -> Name:
        """The application was handed a message; answers its name."""
        name = _name_of(message)
        told = self.told[subscription]
        self._note(name, f"{consumer} got {message.id}, token {message.token}, {message.retry_count} retries")
        if name in told.settled:
            self._complain(f"{subscription}: {name}, {message.id}, came again after its ack", name)
        if self._keys[name] != (message.key or ""):
            self.problems.append(f"{name} came with the key {message.key!r}")
        self._identify(name, message.id, message.uid)
        if lane := self._lane(subscription, name):
            self._check_order(subscription, consumer, lane, name, first=name not in told.delivered)
        told.redelivered += name in told.delivered
        told.delivered.add(name)
        return name

    def _check_order(self, subscription: str, consumer: str, lane: Lane, name: Name, first: bool) -> None:
        key = f"{self._keys[name]!r} in {subscription}"
        entry = lane.entries[name]
        if consumer != lane.consumer:
            lane.consumer, lane.run = consumer, set()
        elif entry <= lane.last:
            lane.run = {earlier for earlier in lane.run if earlier < entry}
        for earlier in lane.unsettled:
            if earlier < entry and earlier not in lane.run:
                text = f"{consumer} got {entry} of key {key} before {earlier} was settled"
                self._complain(text, name, lane.unsettled[earlier])
        if first and entry < lane.newest:
            self._complain(f"{entry} of key {key} came first after {lane.newest} had come", name)
        lane.run.add(entry)
        lane.last = entry
        lane.newest = max(entry, lane.newest)

    def nacking(self, subscription: str, name: Name) -> None:
        """A nack is about to be sent: nobody holds the message, nor the later ones of its lane."""
        self._note(name, f"{subscription} is to nack it")
        if lane := self._lane(subscription, name):
            lane.run = {entry for entry in lane.run if entry < lane.entries[name]}

    def acking(self, subscription: str, names: Sequence[Name]) -> int:
        """Acks are about to be sent; answers what to give to `acked`."""
        told = self.told[subscription]
        for name in names:
            self._note(name, f"{subscription} is to ack it")
            told.asking[name] += 1
            self._reckon(subscription, name)
        return self.crashes

    def acked(self, subscription: str, name: Name, outcome: Outcome, since: int) -> None:
        """An ack was answered."""
        told = self.told[subscription]
        self._note(name, f"{subscription} had its ack answered: {outcome}")
        told.asking[name] -= 1
        if outcome == "settled":
            told.settled.add(name)
        else:
            told.stale.add(name)
            if since != self.crashes:
                told.doubtful.add(name)
        self._reckon(subscription, name)

    def _reckon(self, subscription: str, name: Name) -> None:
        """Keep what is certainly unsettled where there is an order."""
        lane = self._lane(subscription, name)
        if lane is None:
            return
        told = self.told[subscription]
        entry = lane.entries[name]
        if name in told.settled or name in told.doubtful or told.asking[name]:
            lane.unsettled.pop(entry, None)
        else:
            lane.unsettled[entry] = name

    # Explaining

    def _note(self, name: Name, what: str) -> None:
        at = monotonic() - self._began if self.now is None else self.now
        self._journal[name].append(f"{at:.3f} {what}, after {self.crashes} crashes")

    def _complain(self, text: str, *names: Name) -> None:
        stories = ["\n    ".join([f"  {name}:", *self._journal[name]]) for name in names]
        self.problems.append("\n".join([text, *stories]))

    # At the end

    def finished(self, messages: int) -> bool:
        """Whether so many messages have been answered, delivered to everybody and settled there."""
        return len(self.answered) >= messages and all(
            len(told.settled) + len(told.doubtful) >= messages for told in self.told.values()
        )

    def verdict(self) -> list[str]:
        """Everything that was not as promised; at most a few of a kind."""
        return [*self.problems[:10], *list(self._losses())[:10], *list(self._misnumbered())[:10]]

    def _losses(self) -> Iterator[str]:
        for name in self._keys:
            if name not in self.answered:
                yield f"{name} was never answered"
            for subscription, told in self.told.items():
                if name not in told.delivered:
                    yield f"{subscription}: {name}, {self._id_of.get(name)}, never came"
                elif name not in told.settled and name not in told.doubtful:
                    yield f"{subscription}: {name}, {self._id_of.get(name)}, was never settled"

    def _misnumbered(self) -> Iterator[str]:
        """Ids are dense in a partition; those of a producer and key rise in the order of its calls."""
        partitions: dict[int, set[int]] = defaultdict(set)
        newest: dict[tuple[str, str], int] = defaultdict(int)
        for name in sorted(self.answered):
            answer = self.answered[name]
            partitions[answer.partition].add(answer.entry)
            if key := self._keys[name]:
                flow = (name[0], key)
                if answer.entry < newest[flow]:
                    yield f"{name}, entry {answer.entry}, was published behind {newest[flow]} of its key"
                newest[flow] = max(newest[flow], answer.entry)
        for partition, entries in partitions.items():
            if holes := set(range(1, max(entries) + 1)) - entries:
                yield f"partition {partition} has {len(holes)} entries of nobody, such as {min(holes)}"


def _name_of(message: Delivered) -> Name:
    producer, _, number = message.attributes["name"].partition(" ")
    return producer, int(number)
