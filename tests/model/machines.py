"""A machine for each mode, alone and with a reader of the journal beside it."""

from typing import Any, ClassVar

from hypothesis.stateful import invariant

from keylane_broker.engine.filters import Filter
from tests.model.journal import Fold
from tests.model.machine import BrokerMachine


class SharedMachine(BrokerMachine):
    """A shared subscription beside another one."""

    mode = "shared"


class KeySharedMachine(BrokerMachine):
    """A key-shared subscription beside another one."""

    mode = "key_shared"


class ExclusiveMachine(BrokerMachine):
    """An exclusive subscription beside another one."""

    mode = "exclusive"


class FailoverMachine(BrokerMachine):
    """A failover subscription beside another one."""

    mode = "failover"


class JournalMachine(BrokerMachine):
    """Everything that may happen, and a reader of the journal beside it."""

    journal = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.fold = Fold()
        self.read_upto = "-"

    @invariant()
    def the_journal_tells_what_is_so(self) -> None:
        """Read what is new, and compare."""
        engine, model = self.both.engine, self.both.partition
        step: Any = engine.store.entries(self.both.keys.journal, [(self.read_upto, "+")])
        self.fold.there, self.both.begun = self.both.begun, []
        for id, fields in self.both.world.run(step)[0]:
            self.fold.follow(*fields[3::2])
            self.read_upto = f"({id}"
        assert not self.fold.there, "subscriptions that it does not tell of"
        assert self.fold.last == model.last
        assert self.fold.epoch == self.both.lease.epoch
        assert self.fold.subscriptions.keys() == model.subscriptions.keys()
        for name, told in self.fold.subscriptions.items():
            owed = model.subscriptions[name].owed
            leased = {entry: one.claim.consumer for entry, one in owed.items() if one.claim}
            assert told.owed == owed.keys(), f"owed to {name}"
            assert told.leased == leased, f"leased of {name}"
            for entry, one in owed.items():
                least = told.charged[entry]
                assert least <= one.retries <= least + told.crashed[entry], f"charges of {entry} in {name}"


class SharedJournal(JournalMachine):
    """A shared subscription beside another one."""

    mode = "shared"


class KeySharedJournal(JournalMachine):
    """A key-shared subscription beside another one."""

    mode = "key_shared"


class FailoverJournal(JournalMachine):
    """A failover subscription beside another one."""

    mode = "failover"


KEYS = Filter(keys="*a")
EUROPE = Filter(filter={"region": "eu"})
URGENT = Filter(keys="[!b]", filter={"urgent": None})


class FilteredShared(JournalMachine):
    """A shared subscription to some keys beside one to all."""

    mode = "shared"
    filters: ClassVar = {"main": KEYS}


class FilteredKeyShared(JournalMachine):
    """A key-shared subscription to some messages beside one to others."""

    mode = "key_shared"
    filters: ClassVar = {"main": KEYS, "other": EUROPE}


class FilteredFailover(JournalMachine):
    """A failover subscription to some messages beside one to others."""

    mode = "failover"
    filters: ClassVar = {"main": EUROPE, "other": URGENT}


class BesideFiltered(JournalMachine):
    """An exclusive subscription to all messages beside one to some."""

    mode = "exclusive"
    filters: ClassVar = {"other": KEYS}
