"""A worker's place in the cluster: who else is there, which partitions are its own, and what follows.

Everything is in Redis. Events tell when to look; what they miss a heartbeat finds.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

import anyio

from keylane import wire
from keylane.errors import BrokerError, InvalidArgument, Unavailable
from keylane_broker.cluster.controller import Controller
from keylane_broker.cluster.load import LoadMeter
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Owners, Place, TopicSettings, WorkerReport
from keylane_broker.errors import NotOwner
from keylane_broker.logs import FailureLog
from keylane_broker.store.single_flight import SingleFlight

log = logging.getLogger("keylane.broker")

_AGAIN = 0.2  # seconds until something that failed is tried again
_JOINED = 10.0  # seconds that a worker tries to become one, on a Redis that has answered before
_PLACED = 1.0  # seconds in which a new topic should have owners
_LOST = 12  # leases after which a worker that is gone is not shown any more,
_LOST_MS = 600_000  # but not before this


class Host(Protocol):
    """The partitions of a worker, as its membership sees them."""

    @property
    def holds_any(self) -> bool:
        """Whether there is a partition that this worker has the lease of."""

    async def renew_leases(self) -> None:
        """Extend all partition leases at once."""

    def follow(self, moved: set[str]) -> None:
        """Topics have partitions with new owners: take those that are ours, hand over those that are not."""

    def look_again(self, topic: str | None = None, subscription: str | None = None) -> None:
        """Let the dispatchers of a subscription look again, or all."""

    def heard_unowed(self, topic: str) -> None:
        """Another worker has said that a topic has no subscription."""

    def heard_ended(self, topic: str, number: str, leases: list[str]) -> None:
        """Another worker has ended leases for an operator."""


class Membership:
    """What a worker knows of the cluster, and its part in running it."""

    def __init__(
        self, engine: Engine, id: str, *, release: str, lease_ms: int, rebalance_interval: float
    ) -> None:
        self.id = id  # of the worker
        self.lease_ms = lease_ms  # of a partition
        self.version = -1
        self._known: Owners | None = None  # None: read them all
        self.owners: dict[str, list[str]] = {}  # topic -> worker of each partition, "" for none
        self._owned: Counter[str] = Counter()  # how many partitions each is to serve
        self.workers: dict[str, WorkerReport] = {}
        self.controller_id = ""  # who places partitions
        self.load = LoadMeter()
        self.on_tokens: Callable[[], None] = lambda: None  # hears that one was revoked
        self._engine = engine
        self._release = release
        self._rebalance_interval = rebalance_interval
        self._host: Host  # from join() on
        self._address = self._http = ""
        self._controller = Controller(engine, self._is_alive)
        self._state = "serving"
        self._started_ms = 0
        self._gone = False  # nobody is to hear of us any more
        self._beaten = 0.0  # when we were last heard of, by the monotonic clock
        self._trusted = 0.0  # when to believe again that a silent worker is dead
        self._dead: dict[str, int] = {}  # worker -> its last heartbeat, of those that were found dead
        self._relieved = time.monotonic()  # when loads were last looked at
        self._topics_changed = True
        self._placed_for: object = None  # what the placement was made for
        self._look_again = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # the next instant at which somebody may be lost
        self._looking = SingleFlight()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What others ask

    def owner(self, topic: str, partition: int) -> str | None:
        """Return the worker that is to serve a partition, None if there is none yet."""
        names = self.owners.get(topic)
        return (names[partition] or None) if names is not None and partition < len(names) else None

    def not_owner(self, topic: str, partition: int) -> NotOwner:
        """Return what to say about a partition that another worker serves."""
        name = self.owner(topic, partition) or ""
        return NotOwner(topic, partition, name, self.address(name))

    def address(self, worker: str) -> str:
        """Return where a worker listens, "" if that is not known."""
        return self.workers[worker].address if worker in self.workers else ""

    async def placement(self, topic: str) -> tuple[TopicSettings, list[str]]:
        """Return a topic's settings and the worker of each partition, "" for those that have none yet."""
        about = await self._engine.describe_topic(topic)
        count = about.partitions
        end = time.monotonic() + _PLACED
        if not self._is_placed(topic, count):  # it is new, or another of that name
            await self.topics_changed()
            await self.refresh()
            while not self._is_placed(topic, count) and time.monotonic() < end:
                await self.wait_for_change(_AGAIN)
        names = self.owners.get(topic, [])[:count]
        return about, names + [""] * (count - len(names))

    def _is_placed(self, topic: str, count: int) -> bool:
        names = self.owners.get(topic, [])
        return len(names) == count and all(names)

    async def wait_for_change(self, patience: float) -> None:
        """Wait until something has changed, but no longer than so many seconds."""
        await asyncio.wait({self._changed}, timeout=patience)

    async def refresh(self) -> None:
        """Look at the cluster now; all who want to at once share one look."""
        try:
            async with asyncio.timeout(self.lease_ms / 1_000):
                await self._looking.join("look", self._look)
        except TimeoutError:
            raise Unavailable("Redis did not answer in time who is in the cluster") from None

    def read_anew(self) -> None:
        """Redis may have lost writes: a version that we know can come a second time, and mean another."""
        self._known = None
        self.look_soon()

    def look_soon(self) -> None:
        """Look at the cluster soon."""
        self._look_again.set()

    async def topics_changed(self, deleted: str = "") -> None:
        """A topic was made or deleted: have its partitions placed."""
        self._topics_changed = True
        await self._engine.announce(f"topics {deleted}".strip())
        if self.controller_id == self.id:
            await self.refresh()

    # Coming and going

    async def join(self, host: Host, address: str, started_ms: int, *, http: str = "") -> None:
        """Become one of the workers, at an address and an HTTP port; a Redis that is slow is waited for."""
        self._host, self._address, self._started_ms = host, address, started_ms
        self._http = http
        end = time.monotonic() + _JOINED
        while True:
            try:
                await self._engine.enlist(self._report(), self._ttl_ms)
                self._beaten = time.monotonic()
                await self._engine.announce("workers")
                return await self.refresh()
            except Unavailable:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_AGAIN)

    async def leave(self, patience: float) -> None:
        """Hand all partitions to the others; returns when that is done, or cannot be."""
        self._state = "stopping"
        await self._engine.heartbeat(self._report(), self._ttl_ms)
        await self._engine.announce("workers")
        with anyio.move_on_after(patience):
            await self.refresh()
            while self._host.holds_any and self._serving_besides(self.id):
                await self.wait_for_change(_AGAIN)

    async def depart(self) -> None:
        """Be a worker no more."""
        self._gone = True
        await self._engine.depart(self.id)
        await self._engine.announce("workers")

    def _serving_besides(self, worker: str) -> bool:
        return any(
            report.state == "serving" and self._is_alive(report)
            for report in self.workers.values()
            if report.id != worker
        )

    # Heartbeats

    async def beat(self) -> None:
        """Renew the leases, then say that we are here: whoever seems dead has lost its leases before."""
        now = time.monotonic()
        if self._gone:
            return
        if now - self._beaten > self.lease_ms / 2_000:  # a third is the rule
            # We could not be heard, so others could not either: give them time to be heard again.
            self._trusted = now + self.lease_ms / 2_000
        self.load.add(self._engine.take_loads(), max(now - self._beaten, 0.001))
        try:
            await self._host.renew_leases()
        finally:  # one node of a Redis Cluster may be away
            await self._engine.heartbeat(self._report(), self._ttl_ms)
            self._beaten = now
            self.look_soon()

    @property
    def _ttl_ms(self) -> int:
        """How long what we say about ourselves is kept."""
        return max(self.lease_ms * _LOST, _LOST_MS)

    def _report(self) -> WorkerReport:
        messages, script_ms = self.load.total()
        return WorkerReport(
            self.id,
            self._address,
            self._release,
            self._state,
            self._started_ms,
            round(messages, 2),
            round(script_ms, 3),
            self.load.busiest(),
            self._http,
        )

    def alive(self) -> list[WorkerReport]:
        """Return the workers that are not known to be dead, sorted by id."""
        return [report for report in self.workers.values() if self._is_alive(report)]

    def _is_alive(self, report: WorkerReport) -> bool:
        if report.id == self.id:
            return True
        if self._dead.get(report.id) == report.heartbeat_ms:  # what has kept us from being heard came later
            return False
        return report.age_ms < self.lease_ms or (
            time.monotonic() < self._trusted and report.age_ms < self._ttl_ms
        )

    # Following

    async def watch(self) -> None:
        """Look whenever something may have changed, for as long as the worker runs."""
        failures = FailureLog(log, "reading the state of the cluster")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engine.listen, self._heard)
            while True:
                await self._look_again.wait()
                self._look_again.clear()
                try:
                    await self.refresh()
                    failures.recovered()
                except BrokerError as error:
                    failures.failed(error)
                    await asyncio.sleep(_AGAIN)
                    self.look_soon()
                except Exception:
                    log.exception("a bug while looking at the cluster; the worker goes on")
                    await asyncio.sleep(_AGAIN)

    def _heard(self, event: str) -> None:
        kind, *names = event.split()[:3] or [""]
        if kind == "ended" and len(names) == 2:
            self._host.heard_ended(names[0], names[1], event.split()[3:])
        elif kind == "subscription" and len(names) == 2:
            self._host.look_again(*names)
        elif kind == "received" and names:
            self._host.look_again(names[0])
        elif kind == "unowed" and names:
            self._host.heard_unowed(names[0])
        elif kind == "tokens":
            self.on_tokens()
        elif kind == "released":
            self._tell_change()
        else:
            if not event:  # we may have missed any
                self._host.look_again()
            elif names:
                self._host.look_again(names[0])  # its consumers find out that they have none
            self._topics_changed = self._topics_changed or kind in ("", "topics")
            self.look_soon()

    async def _look(self) -> None:
        """Learn who is there and who owns what, and place partitions if that is on us."""
        if self._gone:
            return
        self.controller_id, left_ms = await self._engine.lead(self.id, self.lease_ms)
        owners, reports = await self._engine.owners(self._known), await self._engine.workers()
        self._dead = {report.id: report.heartbeat_ms for report in reports if not self._is_alive(report)}
        if self.controller_id == self.id and await self._place(owners, reports):
            owners = await self._engine.owners()
        self._learn(owners, reports)
        for report in self.workers.values():
            if report.id != self.id and self._is_alive(report):
                left = self.lease_ms - report.age_ms
                if left < 0:  # it is only trusted to come back
                    left = round((self._trusted - time.monotonic()) * 1_000)
                left_ms = min(left_ms, max(left, 0) + 1)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left_ms / 1_000 + 0.001, self.look_soon)

    async def _place(self, owners: Owners, reports: list[WorkerReport]) -> bool:
        """Place partitions if something changed, or to look at loads; return whether any moved."""
        now = time.monotonic()
        by_load = now - self._relieved > self._rebalance_interval
        situation = (owners.version, self._controller.available(reports))
        if not (by_load or self._topics_changed or situation != self._placed_for):
            return False
        self._topics_changed = False
        if by_load:
            self._relieved = now
        try:
            moves = await self._controller.balance(by_load=by_load)
        except BaseException:
            self._topics_changed = True
            raise
        self._placed_for = situation  # moves give it another version
        if by_load:
            await self._engine.forget_topics()
        for report in reports:
            if report.age_ms > self._ttl_ms:
                await self._engine.dismiss(report.id, report.heartbeat_ms)
        return bool(moves)

    def _learn(self, owners: Owners, reports: list[WorkerReport]) -> None:
        self.workers = {report.id: report for report in reports}
        self._known = owners
        before, self.owners = self.owners, owners.topics
        self.version = owners.version
        moved: set[str] = set()
        if self.owners is not before:  # an operator's command looks once for each topic
            topics = before.keys() | self.owners.keys()
            moved = {topic for topic in topics if before.get(topic) != self.owners.get(topic)}
            self._owned = Counter(name for names in self.owners.values() for name in names)
        self._host.follow(moved)
        self._tell_change()

    def _tell_change(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    # Orders of an operator

    async def rebalance(self, dry_run: bool) -> list[wire.Move]:
        """Place partitions by counts and load, now; or only say how."""
        moves = await self._controller.rebalance(dry_run=dry_run)
        if moves and not dry_run:
            await self.refresh()
        return moves

    async def move(self, topic: str, partition: int, worker: str, keep: Collection[Place] = ()) -> None:
        """Give a partition to a worker."""
        await self._controller.move(topic, partition, worker, keep)
        await self.refresh()

    async def drain(self, worker: str, draining: bool) -> None:
        """Take all partitions from a worker, or let it have some again."""
        await self.refresh()
        if draining and not self._serving_besides(worker):
            raise InvalidArgument(f"no other worker serves: nobody could take the partitions of {worker!r}")
        await self._engine.drain(worker, draining)
        await self._engine.announce("workers")
        await self.refresh()

    def report(self, report: WorkerReport) -> wire.WorkerReport:
        """Return what operators are told of a worker."""
        return wire.WorkerReport(
            report.id,
            report.address,
            report.release,
            report.state if self._is_alive(report) else "lost",
            report.started_ms,
            report.heartbeat_ms,
            self._owned[report.id],
            report.messages,
            report.script_ms,
        )
