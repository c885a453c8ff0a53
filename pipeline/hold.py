"""One query at a time reads a subscription: the claim on it, and its renewal."""

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from concurrent.futures import Future
from contextlib import suppress

from client import AsyncClient
from client.errors import BrokerError, ConsumerReplaced, SubscriptionBusy, SubscriptionNotFound
from pipeline.remote import Remote

_PER_SESSION = 3  # renewals: two may fail
_CLOSE = 5.0  # seconds to give back what was taken in vain
_LOOK = 0.25  # seconds between two looks at a session that somebody else has
_SLACK = 0.05  # seconds by which an end may seem to move without having been moved
_log = logging.getLogger("keylane.spark")


class Hold:
    """The claim of one reader on a subscription of some topics, renewed in the background until released."""

    def __init__(self, remote: Remote, topics: list[str], subscription: str, session: float) -> None:
        self.reader = reader_name()
        self._remote = remote
        self._topics = topics
        self._subscription = subscription
        self._session = session
        self._taken: list[str] = []  # topics that are ours
        self._lost: str | None = None  # who has it instead, "" if it is another one of that name
        self._renewing: Future[None] | None = None

    def take(self) -> list[str]:
        """Claim it; who is gone is waited for until its session is, and SubscriptionBusy means one is not.

        The topics in which nobody has ever claimed it before.
        """
        self._renewing = self._remote.start(self._renew, self._remote.client)
        unread = []
        try:
            for topic in self._topics:
                if not self._remote.call(self._take, self._remote.client, topic):
                    unread.append(topic)
                self._taken.append(topic)
        except BaseException:
            self.release(_CLOSE)
            raise
        return unread

    def check(self) -> None:
        """Raise ConsumerReplaced if somebody else has taken it meanwhile."""
        if self._lost == "":
            raise SubscriptionNotFound(
                f"subscription {self._subscription!r} was deleted and made anew while this query read it: "
                "start the query with a new checkpointLocation"
            )
        if self._lost is not None:
            raise ConsumerReplaced(
                f"{self._lost} has taken over subscription {self._subscription!r}: this query did not renew "
                f"its claim within {self._session:g} s (option sessionTimeout), and must not go on"
            )

    def release(self, timeout: float) -> None:
        """Let others have it at once, or when its session ends if the broker cannot be told in that time."""
        if self._renewing is not None:
            self._renewing.cancel()
            for topic in self._taken:
                release = self._remote.client.release
                with suppress(BrokerError, TimeoutError):
                    self._remote.start(release, topic, self._subscription, self.reader).result(timeout)

    async def _take(self, client: AsyncClient, topic: str) -> str:
        """Who had it before."""
        claim = await client.claim(topic, self._subscription, self.reader, session=self._session)
        holder = claim.holder
        latest = time.monotonic() + claim.remaining  # its session ends by then, unless it is renewed
        while not claim.granted:
            await asyncio.sleep(min(_LOOK, claim.remaining + 0.01))
            asked = time.monotonic()
            claim = await client.claim(topic, self._subscription, self.reader, session=self._session)
            if not claim.granted and (claim.holder != holder or asked + claim.remaining > latest + _SLACK):
                raise SubscriptionBusy(
                    f"{claim.holder} reads subscription {self._subscription!r} of topic {topic!r}: two "
                    "queries cannot drain one subscription. Stop the other, or give this one its own"
                )
        return claim.before

    async def _renew(self, client: AsyncClient) -> None:
        while self._lost is None:
            await asyncio.sleep(self._session / _PER_SESSION)
            for topic in self._taken:
                try:
                    claim = await client.claim(topic, self._subscription, self.reader, session=self._session)
                except BrokerError as error:
                    # As long as nobody else takes it, it can still be renewed later.
                    _log.warning(
                        "the claim on subscription %r was not renewed: %s", self._subscription, error
                    )
                    continue
                if not claim.granted or not claim.before:
                    self._lost = "" if claim.granted else claim.holder


def reader_name() -> str:
    """A name for this reader that no other has, and that tells an operator where it runs."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100]
    return f"spark-{host}-{os.getpid()}-{secrets.token_hex(4)}"
