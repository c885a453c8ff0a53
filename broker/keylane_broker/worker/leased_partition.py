"""The lease of a partition: taking it, keeping it, giving it up, and calls under it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from keylane.errors import BrokerError, Fenced, InvalidArgument, TopicNotFound, Unavailable
from keylane_broker.cluster.membership import Membership
from keylane_broker.engine.answers import check_incarnation, replaced
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Delivery, Lease
from keylane_broker.errors import NotOwner
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.single_flight import SingleFlight
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import Clock

log = logging.getLogger("keylane.broker")

T = TypeVar("T")

_RETRY = 0.05  # seconds between attempts at a lease that another worker still holds
_PLACED = 0.5  # seconds to wait for an owner before asking for one again
_LATE = 1.0  # seconds after the end of a lost worker's lease
_FINISHED = 1.0  # seconds that calls have to end before the lease is given up
_TURNS = 3  # of the event loop, from the end of a call to its answer


class LeasedPartition:
    """One partition of a topic, as far as its lease is concerned: what is done under it is elsewhere."""

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
    ) -> None:
        self.topic = topic
        self.number = number
        self.key = partition_keys(topic, number).lease  # says which server has all that is of it
        self.engine = engine
        self.clock = clock
        self.membership = membership
        self.background = background
        self.current_lease: Lease | None = None
        self.epoch = 0  # of the last lease
        self.incarnation = 0  # of the topic that it was of then
        self.kept_until = 0.0  # when the lease ends unless it is renewed, by the monotonic clock
        self.leaving = False  # its lease is about to be released
        self._session_ms = session_ms
        self._taking = SingleFlight()
        self._prolonging = SingleFlight()
        self._comparing = False  # the log with filters
        self._may_have_moved = False  # the lease was lost, so perhaps the partition too
        self._lost_epoch = 0  # of a lease of which nobody has been told yet that it was lost
        self._calls = 0  # under way
        self._quiet: asyncio.Future[None] | None = None  # somebody waits until none is
        self._prolonged: dict[str, int] = {}  # subscription -> epoch in which its sessions were prolonged

    def __str__(self) -> str:
        return f"partition {self.number} of {self.topic!r}"

    # What follows for those who work under the lease

    def lease_taken(self, lease: Lease) -> None:
        """A lease has been taken, and is about to be the current one."""

    def end_consumers(self, error: BrokerError) -> None:
        """There is nothing more to come for any consumer."""

    def drop_lease(self) -> None:
        """Let go of the lease: what was stored under it may be gone."""
        self.current_lease = None

    def forget(self) -> None:
        """The partition is gone, or another worker's."""
        self.engine.forget(self.topic, self.number)

    # Taking it

    @property
    def taking(self) -> bool:
        """Whether its lease is being taken."""
        return self._taking.under_way("lease")

    async def lease(self) -> Lease:
        """Return the lease, taken if need be; NotOwner if the partition is another worker's."""
        while self.current_lease is None:  # it may be lost again before we hear that it was taken
            await self._taking.join("lease", self._take)
        return self.current_lease

    async def _take(self) -> Lease:
        """Take the lease when the partition is ours and nobody holds it any more."""
        membership = self.membership
        loop = asyncio.get_running_loop()
        end = loop.time() + membership.lease_ms / 1_000 + _LATE
        if self._may_have_moved:
            await membership.refresh()
            self._may_have_moved = False
        while not self.background.stopping:
            owner = membership.owner(self.topic, self.number)
            if owner == membership.id:
                lease = await self._acquire()
                if lease is not None:
                    if membership.owner(self.topic, self.number) != membership.id:
                        await self.engine.release(lease)  # it has just gone elsewhere
                        raise self.not_owner()
                    self._adopt(lease)
                    return lease
                patience = _RETRY
            elif owner is not None:
                self._tell_loss(f"it is {owner}'s")
                raise self.not_owner()
            else:
                await self._check_existence()
                await membership.topics_changed()
                patience = _PLACED
                if membership.owner(self.topic, self.number) is not None:
                    continue
            if loop.time() > end:
                raise Unavailable(f"{self} has no owner yet; try again")
            await membership.wait_for_change(patience)
        raise Unavailable("the worker is stopping")

    async def _acquire(self) -> Lease | None:
        began, lease_ms = time.monotonic(), self.membership.lease_ms
        try:
            # Should the clock of a new master be behind that of the old one, ours is that of the old one.
            lease = await self.engine.acquire(
                self.topic, self.number, self.membership.id, lease_ms, known_epoch=self.clock.now_ms()
            )
        except TopicNotFound as error:
            self.close(error)
            await self._check_existence()
            raise
        self.kept_until = began + lease_ms / 1_000
        if lease is not None:
            self.lease_taken(lease)
        return lease

    def _adopt(self, lease: Lease) -> None:
        """Hold a lease; consumers of a topic that had the name before have nothing more to come."""
        if self.incarnation not in (0, lease.incarnation):
            self.end_consumers(replaced(self.topic))
        else:
            self._tell_loss(f"it is ours in epoch {lease.epoch}")
        self._lost_epoch = 0
        self.engine.store.counters.leases_taken += 1
        self.current_lease, self.epoch, self.incarnation = lease, lease.epoch, lease.incarnation

    async def lease_of(self, incarnation: int) -> Lease:
        """Return the lease, if the topic is the one that is meant, else TopicReplaced; 0 is any."""
        try:
            lease = await self.lease()
        except InvalidArgument:  # there is no such partition, in the topic that is there
            about = await self.engine.describe_topic(self.topic)
            check_incarnation(self.topic, incarnation, about.incarnation)
            raise
        if incarnation > lease.incarnation:  # it may be of a topic that is gone, though we have not heard
            about = await self.engine.describe_topic(self.topic)
            if about.incarnation != lease.incarnation:
                self.lose_lease(lease)
                lease = await self.lease()
        check_incarnation(self.topic, incarnation, lease.incarnation)
        return lease

    async def _check_existence(self) -> None:
        """Raise what says most about a partition that is not there."""
        try:
            about = await self.engine.describe_topic(self.topic)
        except TopicNotFound as error:
            self.close(error)
            raise
        if self.number >= about.partitions:
            beyond = InvalidArgument(
                f"topic {self.topic!r} has no partition {self.number}: it has 0 to {about.partitions - 1}"
            )
            self.close(replaced(self.topic) if self.incarnation else beyond)
            raise beyond

    # Losing it

    @property
    def lapsed(self) -> bool:
        """Whether the lease may have ended since it was last renewed: this process may have stood still."""
        return time.monotonic() > self.kept_until

    def not_owner(self) -> NotOwner:
        """Return what to say when another worker serves it."""
        return self.membership.not_owner(self.topic, self.number)

    def fenced(self, lease: Lease) -> None:
        """A script has refused to write under a lease."""
        self.engine.store.counters.fenced += 1
        self.lose_lease(lease)

    def lose_lease(self, lease: Lease) -> None:
        """Know that a lease is no more; the next call takes another, if the partition is still ours."""
        if self.current_lease is lease:
            self.drop_lease()
            self._lost_epoch, self._may_have_moved = lease.epoch, True
            self.engine.store.counters.leases_lost += 1

    def _tell_loss(self, now: str) -> None:
        """Log that a lease was lost, once it is known that the partition is still there."""
        if self._lost_epoch:
            log.warning("lost the lease of %s, epoch %d; now %s", self, self._lost_epoch, now)
            self._lost_epoch = 0

    def close(self, error: BrokerError) -> None:
        """Serve it no more, since it is gone."""
        self.end_consumers(error)
        self.forget()

    async def stop_calls(self) -> Lease | None:
        """Take no more calls, since another worker is to serve it; return the lease, to be released.

        Waits until the calls under way are through, but not for ever: those that come too late are fenced.
        """
        lease, self.current_lease = self.current_lease, None
        self.leaving = True
        await self.finish_calls()
        return lease

    async def finish_calls(self) -> None:
        """Wait until the calls under way are through and answered, but not for ever."""
        if self._calls:
            self._quiet = self._quiet or asyncio.get_running_loop().create_future()
            await asyncio.wait({self._quiet}, timeout=_FINISHED)
            self._quiet = None
            for _ in range(_TURNS):  # so that what they were answered goes out first
                await asyncio.sleep(0)

    # Calls under it

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return self._calls > 0

    def compare(self) -> None:
        """Have the log compared with filters, as far as publishes had no time for that."""
        if not self._comparing:
            self._comparing = True
            self.background.start(self._compare)

    async def _compare(self) -> None:
        try:
            await self.engine.compare_all(self.topic, self.number)
        finally:
            self._comparing = False

    async def call(self, step: Callable[[Engine, Lease], Awaitable[T]], incarnation: int = 0) -> T:
        """Take a step under the lease; after FENCED, which changed nothing, once more under a new one.

        With an `incarnation` only in that topic, and not in another one of its name.
        """
        for _ in range(2):
            lease = await self.lease_of(incarnation)
            self.begin_call()
            try:
                return await step(self.engine, lease)
            except Fenced:
                self.fenced(lease)
            except TopicNotFound:  # there may be another of that name: taking its lease tells
                self.lose_lease(lease)
            finally:
                self.end_call()
        raise Fenced(f"another worker serves {self}")

    def held_lease(self, incarnation: int) -> Lease | None:
        """Return the lease if it is there and the topic is the one that is meant; 0 is any."""
        lease = self.current_lease
        return lease if lease is not None and incarnation in (0, lease.incarnation) else None

    def begin_call(self) -> None:
        """A call is under way, of which the handing over of the partition is to wait for the end."""
        self._calls += 1

    async def call_once(self, step: Awaitable[T]) -> T:
        """Take a step of which the handing over of the partition is to wait for the end."""
        self.begin_call()
        try:
            return await step
        finally:
            self.end_call()

    def end_call(self) -> None:
        """It has ended."""
        self._calls -= 1
        if self._quiet is not None and not self._calls and not self._quiet.done():
            self._quiet.set_result(None)

    async def prolong_sessions(self, subscription: str) -> None:
        """Let consumers of the owner before come back before their sessions count as ended."""

        async def prolong(engine: Engine, lease: Lease) -> None:
            if self._prolonged.get(subscription) != lease.epoch:
                await engine.prolong_sessions(lease, subscription, self._session_ms)
                self._prolonged[subscription] = lease.epoch

        if self.current_lease is None or self._prolonged.get(subscription) != self.current_lease.epoch:
            await self._prolonging.join(subscription, lambda: self.call(prolong))

    async def held_by(self, subscription: str, consumer: str, incarnation: int) -> list[Delivery]:
        """Return what a consumer holds, with deadlines by the worker's clock."""
        return await self.call(
            lambda engine, lease: engine.list_leases(
                lease, subscription, consumer, at_ms=self.clock.now_ms()
            ),
            incarnation,
        )
