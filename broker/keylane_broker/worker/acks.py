"""Acks of one subscription in one partition: what comes while some are under way goes into the next call.

Each is settled as it was leased or, where that is not so or something else is out of the ordinary, by itself.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from keylane import wire
from keylane.errors import BrokerError, Unavailable
from keylane_broker.engine.bodies import pack_names
from keylane_broker.engine.receipts import Receipts
from keylane_broker.engine.turns import SETTLED, WholeAck
from keylane_broker.engine.values import Place
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.leased_partition import LeasedPartition
from keylane_broker.worker.slow_cases import SlowCases

log = logging.getLogger("keylane.broker")

JOINED = 64  # messages that a call for others settles as well; with more, a call of their own costs little


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

    client: AckingClient
    sequence: int
    request: wire.Ack
    consumer: Consumer
    receipts: Receipts

    @property
    def bodies(self) -> list[int | str]:
        """Entry, name, … of those that have a body."""
        return self.request.bodies or []

    @property
    def place(self) -> Place:
        """The topic, and the partition of it."""
        return self.consumer.topic, self.request.partition

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
        incarnation: int,
        gathering: Gathering,
        *,
        settled: Callable[[Ack], None],
        uncertain: Callable[[list[Consumer]], None],
    ) -> None:
        self.under_way = False
        self._partition = partition
        self._subscription = subscription
        self._incarnation = incarnation  # of the topic
        self._gathering = gathering
        self._settled = settled  # hears of each that is settled
        self._uncertain = uncertain  # hears whose leases may have ended without our knowing
        self._pending: list[Ack] = []
        self._slow = SlowCases()

    def add(self, ack: Ack) -> bool:
        """Settle what an ACK names, with others; returns False if it had better go by itself."""
        if not self._pending and self._slow.is_likely():
            return False
        if not self._pending and not self.under_way:
            self._partition.begin_call()  # and ends when all are answered
            self._gathering.begin_acks(self._begin)
        self._pending.append(ack)
        return True

    def take(self, most: int = JOINED) -> list[Ack]:
        """Hand over what waits, up to so many messages, to a call that takes it along.

        done() or not_done() is then due, if it is anything.
        """
        if self.under_way:
            return []
        taken, room = list[Ack](), most
        for ack in self._pending:
            room -= ack.receipts.messages
            if room < 0:
                break
            taken.append(ack)
        del self._pending[: len(taken)]
        self.under_way = bool(taken)
        return taken

    def _begin(self) -> None:
        acks = self.take(SETTLED)
        if not acks:
            return
        partition, engine = self._partition, self._partition.engine
        lease, route = partition.held_lease(self._incarnation), engine.store.route(partition.key)
        if lease is None or route is None:
            self.not_done(acks)
            return
        call = engine.ack_whole_call(lease, self._subscription, [ack.whole for ack in acks], names_of(acks))
        engine.store.post(route, call, partial(self._answered, acks))

    def _answered(self, acks: list[Ack], answer: Any) -> None:
        if isinstance(answer, Exception):
            self.failed(acks, answer)
        elif answer is None or answer[0] != "OK":
            self.not_done(acks)
        else:
            self.done(acks, answer[1], part=bool(answer[2]))

    def done(self, acks: list[Ack], record: str, *, part: bool) -> None:
        """They are settled; the record is of a `part` of their bodies, or of all."""
        self._slow.passed()
        alone = not part and sum(1 for ack in acks if ack.bodies) == 1
        for ack in acks:
            self._settled(ack)
            ack.client.acked(ack, record if ack.bodies else "", alone=alone)
        self._end()

    def not_done(self, acks: list[Ack]) -> None:
        """Nothing was done: each goes by itself, in their order."""
        self._slow.met()
        for ack in acks:
            ack.client.ack_by_itself(ack)
        self._end()

    def failed(self, acks: list[Ack], error: Exception) -> None:
        """It is not known what was done."""
        if not isinstance(error, BrokerError):
            log.error("a bug while settling %s on %s", self._subscription, self._partition, exc_info=error)
        if isinstance(error, Unavailable):
            self._uncertain([ack.consumer for ack in acks])
        for ack in acks:
            ack.client.ack_failed(ack, error)
        self._end()

    def _end(self) -> None:
        self.under_way = False
        if self._pending:
            self._gathering.begin_acks(self._begin)
        else:
            self._partition.end_call()


def names_of(acks: list[Ack]) -> str:
    """Return entry and name of each body of acks, as scripts store them; "" for none."""
    names = [part for ack in acks for part in ack.bodies]
    return pack_names(names) if names else ""
