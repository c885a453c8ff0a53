"""A partition that this worker serves: its lease, its publishes, its delayed messages and its dispatchers."""

import asyncio
from collections.abc import Callable

from keylane.errors import BrokerError
from keylane_broker.cluster.membership import Membership
from keylane_broker.engine.codec import rows
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import Clock, instant
from keylane_broker.worker.consumer import Consumers
from keylane_broker.worker.delays import Delays
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.leased_partition import LeasedPartition
from keylane_broker.worker.publisher import Publisher


class Partition(LeasedPartition):
    """One partition of a topic; whatever of it can be lost is in here."""

    def __init__(
        self,
        topic: str,
        number: int,
        *,
        engine: Engine,
        clock: Clock,
        membership: Membership,
        background: Background,
        session_ms: int,
        consumers: Consumers,
        on_forget: Callable[["Partition"], None],
    ) -> None:
        super().__init__(
            topic,
            number,
            engine=engine,
            clock=clock,
            membership=membership,
            background=background,
            session_ms=session_ms,
        )
        self.dispatchers: dict[str, Dispatcher] = {}  # by subscription
        self._consumers = consumers
        self._on_forget = on_forget
        self._delays = Delays(self, self.appended)
        self._publisher = Publisher(
            self, notify=self._notify, appended=self.appended, expect=self._delays.expect
        )
        self.publish = self._publisher.publish

    # The log

    def appended(self, entry: int) -> None:
        """The log goes up to this entry now."""
        for dispatcher in self.dispatchers.values():
            dispatcher.appended(entry)

    def _notify(self) -> None:
        """Let the dispatchers fetch."""
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.notify()

    # The lease

    def lease_taken(self, lease: Lease) -> None:
        """Go on with what the owner before has not done."""
        self._delays.expect(instant(lease.due_ms, lease.now_ms))
        self._delays.expect(instant(lease.marks_due_ms, lease.now_ms))
        self.engine.on_bodies_to_delete(self.topic, self.number)
        asyncio.get_running_loop().call_soon(self._watch_sessions, lease)  # when it is ours
        if lease.sweep:
            self.background.start(self.engine.drop_unowed, self.topic, self.number)

    def _watch_sessions(self, lease: Lease) -> None:
        """See to the ends of sessions, also of those whose consumers come back to nobody."""
        for name, mode, delivery in rows(lease.in_use, 3):
            dispatcher = self.dispatcher(name, mode, delivery)
            dispatcher.expect(0.0)
            dispatcher.wake()

    def drop_lease(self) -> None:
        """Let go of the lease: what was stored under it may be gone."""
        super().drop_lease()
        self._publisher.confirmations.lease_lost()

    async def stop_calls(self) -> Lease | None:
        """Take no more calls, since another worker is to serve it; return the lease, to be released."""
        self._delays.forget()
        return await super().stop_calls()

    def redirect_consumers(self) -> None:
        """Tell the consumers where to go on; what they hold stays theirs."""
        self.leaving = False
        if self.membership.owner(self.topic, self.number) in (None, self.membership.id):
            self._notify()  # it has come back
            return
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.redirect_consumers()
        if not (
            self.busy or self._publisher.busy or self.current_lease or self.taking
        ):  # else at the next look
            self.forget()

    def end_consumers(self, error: BrokerError) -> None:
        """Tell every consumer that there is nothing more to come, and why."""
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.end_consumers(error)
        self.dispatchers.clear()

    def forget(self) -> None:
        """The partition is gone, or another worker's."""
        self._delays.forget()
        self._on_forget(self)
        super().forget()

    # Consuming

    def dispatcher(self, subscription: str, mode: str, delivery: str) -> Dispatcher:
        """Return the dispatcher of a subscription, made for its first consumer or to end sessions."""
        dispatcher = self.dispatchers.get(subscription)
        if dispatcher is None:
            dispatcher = self.dispatchers[subscription] = Dispatcher(
                self,
                subscription,
                mode,
                delivery,
                consumers=self._consumers,
                on_idle=self._remove_dispatcher,
            )
        return dispatcher

    def _remove_dispatcher(self, dispatcher: Dispatcher) -> None:
        if self.dispatchers.get(dispatcher.subscription) is dispatcher:
            del self.dispatchers[dispatcher.subscription]
