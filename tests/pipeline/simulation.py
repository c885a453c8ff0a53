"""A partition in plain Python: it lives at random, writes its journal, is looked at while it lives, and
robbed.

It knows what the audit has to find out: which entries were taken out of the log while somebody owed them.
"""

import random
from dataclasses import dataclass, field

MODES = ("shared", "key_shared", "exclusive", "cursor")
NAMES = ("a", "b", "c")
STARTS = ("subscribed", "sought")


@dataclass
class Record:
    """One record of the journal."""

    offset: int
    at: int
    what: str
    sub: str
    by: str
    ranges: list[tuple[int, int | None]]


@dataclass
class Sub:
    """A subscription: what lies after the cursor is owed, and what is leased or waits."""

    mode: str
    cursor: int
    sparse: int
    life: int
    leased: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    filtered: bool = False
    unwanted: set[int] = field(default_factory=set)  # entries after the cursor that its filter leaves out

    def owes(self, entry: int) -> bool:
        """Whether it does."""
        fresh = entry > self.cursor and entry not in self.unwanted
        return fresh or entry in self.leased or entry in self.waiting


@dataclass
class Look:
    """What a snapshot has."""

    latest: int
    looked: int
    positions: dict[str, tuple[str, int]]  # subscription -> mode, position
    log: set[int] = field(default_factory=set)
    records: list[Record] = field(default_factory=list)
    first: int = 1  # record


class Partition:
    """The whole of it."""

    def __init__(self, luck: random.Random, *, thief: bool) -> None:
        self.luck = luck
        self.thief = thief
        self.log: set[int] = set()
        self.last = 0
        self.ledger = 1
        self.subs: dict[str, Sub] = {}
        self.records: list[Record] = []
        self.now = 1_794_800_000_000
        self.lives = 0
        self.robbed: dict[
            tuple[str, int], set[int]
        ] = {}  # subscription and life -> entries taken while it owed them
        self.taken: dict[int, int] = {}  # entry -> when, counted in records
        self.unsettled_when_taken: set[int] = set()

    def live(self, steps: int, *, log_last: bool = False) -> Look:
        """Do something so many times, and be looked at in between: offsets, log, journal; or the log last."""
        moments = sorted(self.luck.sample(range(steps + 1), 3))
        log_at, journal_at = (moments[2], moments[1]) if log_last else (moments[1], moments[2])
        look = Look(0, 0, {})
        for step in range(moments[2] + 1):
            if step == moments[0]:
                look.latest, look.looked = self.last + 1, len(self.records) + 1
                look.positions = {name: (sub.mode, sub.cursor + 1) for name, sub in self.subs.items()}
            if step == log_at:
                look.log = {entry for entry in self.log if entry < look.latest or self.luck.random() < 0.5}
            if step == journal_at:
                look.records = list(self.records)
                if self.records and self.luck.random() < 0.2:
                    look.first = self.luck.randint(1, len(self.records))
            if step < moments[2]:
                self.step()
        return look

    def step(self) -> None:
        """Do something."""
        self.now += self.luck.randint(0, 400_000)
        acts = [self.publish] * 5 + [self.subscribe] * 2 + [self.unsubscribe, self.seek]
        acts += [self.fetch] * 6 + [self.ack] * 5 + [self.give_back] * 2 + [self.commit] * 3 + [self.move]
        if self.thief:
            acts.append(self.rob)
        self.luck.choice(acts)()

    def write(self, what: str, sub: str, by: str, entries: set[int]) -> None:
        """A record of ranges, cut at random as scripts do."""
        ranges: list[tuple[int, int | None]] = []
        for entry in sorted(entries):
            if ranges and ranges[-1][1] == entry - 1 and self.luck.random() < 0.9:
                ranges[-1] = (ranges[-1][0], entry)
            else:
                ranges.append((entry, entry))
        if ranges:
            self.records.append(Record(len(self.records) + 1, self.now, what, sub, by, ranges))

    def mark(self, what: str, sub: str, number: int) -> None:
        """A record of one number."""
        self.records.append(Record(len(self.records) + 1, self.now, what, sub, "", [(number, None)]))

    def some(self, entries: set[int]) -> set[int]:
        """Some of them."""
        return {entry for entry in entries if self.luck.random() < 0.6}

    def pick(self, *modes: str) -> tuple[str, Sub] | None:
        """A subscription, of one of these modes if any are named."""
        fit = [(name, sub) for name, sub in sorted(self.subs.items()) if not modes or sub.mode in modes]
        return self.luck.choice(fit) if fit else None

    def publish(self) -> None:
        """A batch; where nobody subscribes nothing is stored."""
        if self.subs:
            entries = set(range(self.last + 1, self.last + 1 + self.luck.randint(1, 6)))
            self.last = max(entries)
            self.log |= entries
            self.records.append(
                Record(
                    len(self.records) + 1,
                    self.now,
                    "published",
                    "",
                    str(self.ledger),
                    [(min(entries), self.last)],
                )
            )
            for name, sub in self.subs.items():
                self.compare(name, sub, entries)
            self.forget(entries)

    def compare(self, name: str, sub: Sub, entries: set[int]) -> None:
        """What a filter leaves out is never owed."""
        if sub.filtered:
            unwanted = self.some(entries)
            sub.unwanted |= unwanted
            self.write("filtered", name, "", unwanted)

    def move(self) -> None:
        """Another worker: a new ledger."""
        self.ledger += 1
        self.mark("moved", "", self.last + 1)

    def cursor_for(self) -> int:
        """Where to begin: at the end, at the oldest entry, or anywhere between."""
        oldest = min(self.log, default=self.last + 1) - 1
        return self.luck.choice([self.last, oldest, self.luck.randint(oldest, self.last)])

    def subscribe(self) -> None:
        """Make one that is not there."""
        free = [name for name in NAMES if name not in self.subs]
        if free:
            name, self.lives = self.luck.choice(free), self.lives + 1
            sub = self.subs[name] = Sub(self.luck.choice(MODES), self.cursor_for(), self.last, self.lives)
            sub.filtered = sub.mode != "cursor" and self.luck.random() < 0.4
            self.mark("subscribed", name, sub.cursor + 1)
            self.compare(name, sub, {entry for entry in self.log if entry > sub.cursor})

    def unsubscribe(self) -> None:
        """Delete one; what only it owed goes."""
        if (found := self.pick()) and self.luck.random() < 0.5:
            name, sub = found
            del self.subs[name]
            self.robbed.pop((name, sub.life), None)
            self.mark("unsubscribed", name, sub.cursor + 1)
            self.forget(set(self.log))

    def seek(self) -> None:
        """Move one; what it had in hand is given up."""
        if (found := self.pick()) and self.luck.random() < 0.7:
            name, sub = found
            sub.cursor, sub.sparse = self.cursor_for(), self.last
            sub.leased, sub.waiting, sub.unwanted = set(), set(), set()
            self.robbed.pop((name, sub.life), None)
            self.mark("sought", name, sub.cursor + 1)
            self.compare(name, sub, {entry for entry in self.log if entry > sub.cursor})
            self.forget(set(self.log))

    def forget(self, entries: set[int]) -> None:
        """What nobody owes leaves the log."""
        self.log -= {entry for entry in entries if not any(sub.owes(entry) for sub in self.subs.values())}

    def fetch(self) -> None:
        """Lease what waits and what is fresh; with lanes by key some of the fresh must wait."""
        if not (found := self.pick("shared", "key_shared", "exclusive")):
            return
        name, sub = found
        again = self.some(sub.waiting)
        upto = min(self.last, sub.cursor + self.luck.randint(0, 8))
        fresh = {
            entry
            for entry in range(sub.cursor + 1, upto + 1)
            if entry not in sub.unwanted and (entry > sub.sparse or entry in self.log)
        }
        behind = self.some(fresh) if sub.mode == "key_shared" else set()
        sub.cursor = max(upto, sub.cursor)
        sub.waiting = (sub.waiting - again) | behind
        delivered = again | (fresh - behind)
        sub.leased |= delivered
        self.write("delivered", name, "c1", delivered)
        gone = delivered - self.log
        sub.leased -= gone
        self.write("lost", name, "c1", gone)

    def ack(self) -> None:
        """Settle some of what is leased, by the consumer or by an operator."""
        if found := self.pick("shared", "key_shared", "exclusive"):
            name, sub = found
            done = self.some(sub.leased)
            sub.leased -= done
            self.write(("acked", "acked", "skipped", "deleted")[sum(done) % 4], name, "c1", done)
            self.robbed.get((name, sub.life), set()).difference_update(done)
            self.forget(done)

    def give_back(self) -> None:
        """By nack, timeout, crash or leave."""
        if found := self.pick("shared", "key_shared", "exclusive"):
            name, sub = found
            back = self.some(sub.leased)
            sub.leased -= back
            sub.waiting |= back
            self.write(self.luck.choice(["nacked", "timed_out", "crashed", "released"]), name, "c1", back)

    def commit(self) -> None:
        """Of a reader by position."""
        if found := self.pick("cursor"):
            name, sub = found
            done = set(range(sub.cursor + 1, self.luck.randint(sub.cursor, self.last) + 1))
            sub.cursor += len(done)
            self.write("committed", name, "reader", done)
            self.robbed.get((name, sub.life), set()).difference_update(done)
            self.forget(done)

    def rob(self) -> None:
        """Take an entry out of the log behind everybody's back."""
        if self.log:
            entry = self.luck.choice(sorted(self.log))
            self.log.remove(entry)
            self.taken[entry] = len(self.records)
            for name, sub in self.subs.items():
                if sub.owes(entry):
                    self.robbed.setdefault((name, sub.life), set()).add(entry)
