"""The partition map of a topic: which worker serves each partition, asked for again when it may be wrong."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from keylane import wire
from keylane.connect.pool import Peer, Pool
from keylane.errors import BrokerError, TopicNotFound
from keylane.retry import backoff
from keylane.tasks import SingleFlight

Ask = Callable[[str], Awaitable[tuple[Peer, wire.InfoReply]]]


class TopicMap:
    """Who serves the partitions of a topic, as far as is known; `watchers` are called when that changes."""

    def __init__(
        self,
        topic: str,
        pool: Pool,
        ask: Ask,
        watch: Callable[[Peer, str], None],
        gone: Callable[["TopicMap"], None],
    ) -> None:
        self.topic = topic
        self.owners: list[Peer | None] = []  # None: nobody yet
        self.incarnation = 0  # of the topic: another one of its name has another; 0: not known
        self.inline = 0  # bytes of a body that its messages have inline
        self.max_frame = wire.MAX_FRAME  # bytes that its workers take
        self.watchers: dict[Callable[[], None], None] = {}
        self._pool = pool
        self._ask = ask
        self._watch = watch
        self._gone = gone
        self._asking: SingleFlight[str, None] = SingleFlight(pool.tasks, "the client was closed")
        self._again = False  # somebody has wanted to know since it was asked last
        self._hurry = asyncio.Event()
        self._attempt = 0  # answers, one after the other, that told nothing new
        self._due = 0.0  # not to be asked again before

    @property
    def known(self) -> bool:
        """Whether it was ever answered."""
        return bool(self.owners)

    def owner(self, partition: int) -> Peer | None:
        """Return who serves a partition; if there is no such partition, a worker that will say so."""
        if 0 <= partition < len(self.owners):
            return self.owners[partition]
        return next(filter(None, self.owners), None)

    def names(self, peer: Peer) -> bool:
        """Return whether a worker serves something of the topic."""
        return peer in self.owners

    async def refresh(self) -> None:
        """Ask, together with all who want that; after answers that told nothing new, not at once."""
        self._again = True
        await self._asking.run(self.topic, self._refresh)

    def renew(self) -> None:
        """It has changed: ask at once, and nobody waits for it."""
        self._again = True
        self._attempt, self._due = 0, 0.0
        self._hurry.set()
        self._asking.start(self.topic, self._refresh)

    def redirected(self, partition: int, address: str) -> None:
        """A worker says who has a partition; the rest of the map may be old, too."""
        if address and 0 <= partition < len(self.owners):
            owners = [*self.owners[:partition], self._pool.peer(address), *self.owners[partition + 1 :]]
            self._set(owners, self.incarnation)

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    await self._hurry.wait()
            self._again = changed = False
            try:
                changed = self._take(*await self._ask(self.topic))
            except BrokerError as error:
                if isinstance(error, TopicNotFound):
                    self._set([], 0)
                    self._gone(self)
                if not self._again:
                    raise
            finally:
                self._attempt = 0 if changed else self._attempt + 1
                self._due = loop.time() + (0.0 if changed else backoff(self._attempt - 1, maximum=1.0))
            if not self._again:
                return

    def _take(self, peer: Peer, info: wire.InfoReply) -> bool:
        """Take what a worker has answered; whether it was news."""
        self.max_frame, self.inline = info.max_frame, info.inline
        peers = [
            peer if worker.id == info.worker else self._pool.peer(worker.address) for worker in info.workers
        ]
        owners = [peers[at] if 0 <= at < len(peers) else None for at in info.owners]
        return self._set(owners, info.incarnation)

    def _set(self, owners: list[Peer | None], incarnation: int) -> bool:
        if (owners, incarnation) == (self.owners, self.incarnation):
            return False
        self.owners, self.incarnation = owners, incarnation
        for peer in set(owners):
            if peer is not None:
                self._watch(peer, self.topic)
        for call in list(self.watchers):
            call()
        return True
