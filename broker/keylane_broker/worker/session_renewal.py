"""Tells Redis which consumers are still here, so that the leases of those that are lost come back."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from keylane.errors import BrokerError, SubscriptionNotFound, TopicNotFound, Unavailable
from keylane_broker.errors import NotOwner
from keylane_broker.worker.background import Background
from keylane_broker.worker.consumer import Consumer, Source

log = logging.getLogger("keylane.broker")

_SOON = 0.2  # seconds from the end of a connection until the sessions beside its own are renewed
_AT_ONCE, _BETWEEN = 100, 0.01  # sessions are renewed of so many partitions at once, every so many seconds
_PATIENCE = 1.0  # seconds for the sessions of a partition, at least


class Sessions:
    """The sessions of a worker's consumers."""

    def __init__(
        self, dispatchers: Callable[[], Iterable[Source]], background: Background, session_ms: int
    ) -> None:
        self._dispatchers = dispatchers  # all that have consumers
        self._background = background
        self._session_ms = session_ms
        self._soon: set[Source] = set()  # whose sessions are about to be renewed

    async def renew_sessions(self) -> None:
        """Renew all; Unavailable if some could not be."""
        dispatchers = list(self._dispatchers())
        # Some at a time: so many calls at once would keep everybody else waiting, and the leases' renewal.
        pause = min(_BETWEEN, self._session_ms / 9_000 * _AT_ONCE / max(1, len(dispatchers)))
        renewed = await asyncio.gather(
            *(self._renew(one, number // _AT_ONCE * pause) for number, one in enumerate(dispatchers))
        )
        if not all(renewed):
            raise Unavailable(f"{renewed.count(False)} of {len(renewed)} subscriptions could not be renewed")

    def renew_beside(self, lost: Iterable[Consumer]) -> None:
        """Consumers have gone without a word: renew the others, so that no new owner waits for these."""
        loop = asyncio.get_running_loop()
        for dispatcher in {source for one in lost for source in one.dispatchers.values()} - self._soon:
            self._soon.add(dispatcher)
            loop.call_later(_SOON, self._background.start, self._renew_soon, dispatcher)

    async def _renew_soon(self, dispatcher: Source) -> None:
        self._soon.discard(dispatcher)
        if not self._background.stopping:
            await self._renew(dispatcher)

    async def _renew(self, dispatcher: Source, wait: float = 0.0) -> bool:
        """Renew the sessions of one partition and subscription; its trouble is not that of others."""
        if wait:
            await asyncio.sleep(wait)
        try:
            # One node of a Redis Cluster that is silent must not cost the sessions on the others.
            async with asyncio.timeout(max(self._session_ms / 3_000, _PATIENCE)):
                await dispatcher.renew_sessions(self._session_ms)
        except TimeoutError:
            return False
        except BrokerError as error:
            log.debug("%s: %s", dispatcher, error)
            dispatcher.notify()
            return isinstance(error, (TopicNotFound, SubscriptionNotFound, NotOwner))
        return True
