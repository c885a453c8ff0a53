"""A partition that this worker serves: its lease, its publishes, what falls due, and its dispatchers."""

import asyncio
from collections.abc import Callable

from keylane.errors import BrokerError
from keylane_broker.cluster.membership import Membership
from keylane_broker.engine.codec import rows
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.messages import EndedLease
from keylane_broker.engine.values import Lease
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import Clock, instant
from keylane_broker.worker.consumer import Consumers
from keylane_broker.worker.delays import Delays
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.expiry import Expiry
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.hot_keys import HotKeys
from keylane_broker.worker.leased_partition import LeasedPartition
from keylane_broker.worker.publisher import Publisher
from keylane_broker.worker.retention import Retention


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
        gathering: Gathering,
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
        self._gathering = gathering
        self._on_forget = on_forget
        self._expiry = Expiry(self)
        self._delays = Delays(self, self.appended, self._expiry.expect)
        self.retention = Retention(self)
        self._publisher = Publisher(
            self,
            self.dispatchers,
            gathering,
            appended=self.appended,
            expect=self._delays.expect,
            expires=self._expiry.expect,
        )
        self.publish = self._publisher.publish

    # The log

    def appended(self, entry: int) -> None:
        """The log goes up to this entry now."""
        self.retention.appended()
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
        self.engine.on_outbox(self.topic, self.number)
        asyncio.get_running_loop().call_soon(self._watch_sessions, lease)  # when it is ours
        if lease.expires:
            self._expiry.expect(0.0)
        if lease.retains:
            self.retention.look()
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
        self.retention.forget()
        self._expiry.forget()
        return await super().stop_calls()

    def redirect_consumers(self) -> None:
        """Tell the consumers where to go on; what they hold stays theirs."""
        self.leaving = False
        if self.membership.owner(self.topic, self.number) in (None, self.membership.id):
            self._notify()  # it has come back
            return
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.redirect_consumers()
        if not (self.busy or self.current_lease or self.taking):  # else at the next look
            self.forget()

    def end_consumers(self, error: BrokerError) -> None:
        """Tell every consumer that there is nothing more to come, and why."""
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.end_consumers(error)
        self.dispatchers.clear()

    def forget(self) -> None:
        """The partition is gone, or another worker's."""
        self._delays.forget()
        self.retention.forget()
        self._expiry.forget()
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
                gathering=self._gathering,
                on_idle=self._remove_dispatcher,
            )
        return dispatcher

    @property
    def hot_keys(self) -> HotKeys:
        """The keys that most messages were published under, since this worker serves it."""
        return self._publisher.hot_keys

    async def tell_ended(self, ended: list[EndedLease]) -> None:
        """An operator has ended leases: tell the consumers, behind what a fetch under way sends them."""
        for name, dispatcher in list(self.dispatchers.items()):
            its = [lease[1:] for lease in ended if lease.subscription == name]
            if its:
                await dispatcher.wait_for_fetch()
                dispatcher.tell_ended(its)

    def _remove_dispatcher(self, dispatcher: Dispatcher) -> None:
        if self.dispatchers.get(dispatcher.subscription) is dispatcher:
            del self.dispatchers[dispatcher.subscription]
