"""Acks of one subscription in one partition: what comes while some are under way goes into the next call.

Each is settled as it was leased or, where that is not so or something else is out of the ordinary, by itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from keylane.errors import Unavailable
from keylane.wire import Frame
from keylane_broker.engine.bodies import pack_names
from keylane_broker.engine.receipts import Receipts
from keylane_broker.engine.turns import AT_ONCE, WholeAck
from keylane_broker.engine.values import Place
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.leased_partition import LeasedPartition
from keylane_broker.worker.slow_cases import SlowCases


class AckingClient(Protocol):
    """A connection, as far as its acks are concerned."""

    def acked(self, ack: "Ack", record: str, *, alone: bool) -> None:
        """Answer an ACK; `record` is that of bodies to be deleted, all its own where it is alone."""

    def ack_failed(self, ack: "Ack", error: Exception) -> None:
        """Answer an ACK."""

    def ack_by_itself(self, ack: "Ack") -> None:
        """Settle it by the script that knows every case."""


class Ack(NamedTuple):
    """An ACK that waits for its turn, or for its answer."""

    connection: AckingClient
    frame: Frame
    consumer: Consumer
    partition: int
    receipts: Receipts
    bodies: list[int | str]  # entry, name, … of those that have a body

    @property
    def place(self) -> Place:
        """The topic, and the partition of it."""
        return self.consumer.topic, self.partition

    @property
    def whole(self) -> WholeAck:
        """What the engine is to do."""
        return WholeAck(self.consumer.name, self.receipts)


class Acks:
    """The acks of one dispatcher that are not answered yet."""

    def __init__(
        self,
        partition: LeasedPartition,
        subscription: str,
        gathering: Gathering,
        *,
        settled: Callable[[Ack], None],
        uncertain: Callable[[list[Consumer]], None],
    ) -> None:
        self.under_way = False
        self._partition = partition
        self._subscription = subscription
        self._gathering = gathering
        self._settled = settled  # hears of each that is settled
        self._uncertain = uncertain  # hears whose leases may have ended without our knowing
        self._pending: list[Ack] = []
        self._slow = SlowCases()

    def add(self, ack: Ack) -> bool:
        """Settle what an ACK names, with others; returns False if it had better go by itself."""
        if not self._pending and self._slow.is_likely():
            return False
        self._pending.append(ack)
        if not self.under_way:
            self._gathering.begin_acks(self._begin)
        return True

    def take(self) -> list[Ack]:
        """Hand over what waits to a call that takes it along; done() or not_done() is then due."""
        if self.under_way or not self._pending:
            return []
        taken, room = list[Ack](), AT_ONCE
        for ack in self._pending:
            room -= ack.receipts.messages
            if room < 0 and taken:
                break
            taken.append(ack)
        del self._pending[: len(taken)]
        self.under_way = True
        return taken

    def send_all(self) -> None:
        """Settle each that waits by itself: something is asked that must not overtake them."""
        waiting, self._pending = self._pending, []
        for ack in waiting:
            ack.connection.ack_by_itself(ack)

    def _begin(self) -> None:
        acks = self.take()
        if not acks:
            return
        partition, lease, engine = self._partition, self._partition.current_lease, self._partition.engine
        route = engine.store.route(partition.key)
        if lease is None or route is None:
            self.not_done(acks)
            return
        call = engine.ack_whole_call(lease, self._subscription, [ack.whole for ack in acks], names_of(acks))
        partition.begin_call()
        engine.store.post(route, call, partial(self._answered, acks))

    def _answered(self, acks: list[Ack], answer: Any) -> None:
        self._partition.end_call()
        if isinstance(answer, Exception):
            self.failed(acks, answer)
        elif answer is None or answer[0] != "OK":
            self.not_done(acks)
        else:
            self.done(acks, answer[1])

    def done(self, acks: list[Ack], record: str) -> None:
        """They are settled."""
        self._slow.passed()
        with_bodies = sum(1 for ack in acks if ack.bodies)
        for ack in acks:
            self._settled(ack)
            ack.connection.acked(ack, record if ack.bodies else "", alone=with_bodies == 1)
        self._end()

    def not_done(self, acks: list[Ack]) -> None:
        """Nothing was done: each goes by itself, in their order."""
        self._slow.met()
        for ack in acks:
            ack.connection.ack_by_itself(ack)
        self._end()

    def failed(self, acks: list[Ack], error: Exception) -> None:
        """It is not known what was done."""
        if acks and isinstance(error, Unavailable):
            self._uncertain([ack.consumer for ack in acks])
        for ack in acks:
            ack.connection.ack_failed(ack, error)
        self._end()

    def _end(self) -> None:
        self.under_way = False
        if self._pending:
            self._gathering.begin_acks(self._begin)


def names_of(acks: list[Ack]) -> str:
    """Return entry and name of each body of acks, as scripts store them; "" for none."""
    names = [part for ack in acks for part in ack.bodies]
    return pack_names(names) if names else ""
