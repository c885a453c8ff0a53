"""What a journal tells, folded into what must be so after it: who is owed what, and who holds it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CHARGED = {"nacked", "timed_out"}
REMOVED = {"skipped", "deleted", "filtered"}
GIVEN_BACK = CHARGED | {"released", "crashed"}


@dataclass
class Told:
    """A subscription, as the journal tells of it."""

    owed: set[int]
    leased: dict[int, str] = field(default_factory=dict)  # entry -> consumer
    charged: Counter[int] = field(default_factory=Counter)  # nacked or timed out
    crashed: Counter[int] = field(default_factory=Counter)  # charged, if it was the oldest


@dataclass
class Fold:
    """A partition whose journal was on from its first message on."""

    begun: bool = False
    last: int = 0
    epoch: int = 0
    subscriptions: dict[str, Told] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)  # entries that have become dead letters, in one of them
    # What is in the log where subscriptions begin or are moved next, as somebody else knows.
    there: list[set[int]] = field(default_factory=list)

    def follow(self, what: str, sub: str, by: str, entries: str) -> None:
        """Take in one record; AssertionError where it cannot follow on those before it."""
        assert self.begun == (what != "begun"), "a journal that was switched on says so first, and once"
        if what == "begun":
            self.begun = True
            assert (by, int(entries)) == ("", self.last + 1), "the first entry that it will tell of"
        elif what == "moved":
            worker, epoch = by.split()
            assert worker
            assert int(epoch) > self.epoch, "epochs grow"
            assert int(entries) == self.last + 1, "the next ledger goes on"
            self.epoch = int(epoch)
        elif what == "published":
            self._publish(by, list(numbers(entries)))
        elif what in ("subscribed", "sought"):
            assert (sub in self.subscriptions) == (what == "sought")
            log = {entry for one in self.subscriptions.values() for entry in one.owed}
            log |= self.dead & self.there.pop(0)
            self.subscriptions[sub] = Told({entry for entry in log if entry >= int(entries)})
        elif what == "unsubscribed":
            del self.subscriptions[sub]
        else:
            self._settle(what, self.subscriptions[sub], by, list(numbers(entries)))

    def _publish(self, ledger: str, entries: list[int]) -> None:
        assert int(ledger) == self.epoch, "only the owner publishes"
        assert entries == list(range(self.last + 1, self.last + len(entries) + 1)), "entries are dense"
        self.last = entries[-1]
        for one in self.subscriptions.values():
            one.owed.update(entries)

    def _settle(self, what: str, told: Told, by: str, entries: Sequence[int]) -> None:
        assert by or what in REMOVED, "a consumer"
        for entry in entries:
            assert entry in told.owed, f"{entry} is {what} and not owed"
            if what in REMOVED:
                assert told.leased.pop(entry, "") == by, f"{entry} is {what} and not with {by!r}"
                told.owed.remove(entry)
                continue
            if what in ("dead_lettered", "parked", "resumed"):
                assert entry not in told.leased, f"{entry} is {what} and still with {told.leased.get(entry)}"
                if what == "dead_lettered":
                    told.owed.remove(entry)
                    self.dead.add(entry)
                if what != "parked":
                    told.charged.pop(entry, None)
                    told.crashed.pop(entry, None)
                continue
            if what == "delivered":
                assert entry not in told.leased, f"{entry} is with {told.leased.get(entry)} already"
                told.leased[entry] = by
                continue
            assert told.leased.get(entry) == by, f"{entry} is {what} and not with {by}"
            if what == "acked":
                told.owed.remove(entry)
            else:
                assert what in GIVEN_BACK | {"extended"}, what
            told.charged[entry] += what in CHARGED
            told.crashed[entry] += what == "crashed"
            if what != "extended":
                del told.leased[entry]


def numbers(entries: str) -> Iterator[int]:
    """The entries of a record's ranges, which ascend."""
    before = 0
    for text in entries.split():
        first, _, last = text.partition("-")
        assert int(first) > before + 1 or not before, "ranges are merged"
        before = int(last or first)
        assert before >= int(first)
        yield from range(int(first), before + 1)
