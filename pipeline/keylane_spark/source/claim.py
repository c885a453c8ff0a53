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

from keylane import AsyncClient
from keylane.errors import (
    BrokerError,
    ConsumerReplaced,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane.types import Claim
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.checkpoint_format import Identities, Identity

_PER_SESSION = 3  # renewals: two may fail
_CLOSE = 5.0  # seconds to give back what was taken in vain
_LOOK = 0.25  # seconds between two looks at a session that somebody else has
_SLACK = 0.05  # seconds by which an end may seem to move without having been moved
_log = logging.getLogger("keylane.spark")


class SubscriptionClaim:
    """The claim of one reader on a subscription of some topics, renewed in the background until released."""

    def __init__(
        self, remote: BackgroundClient, identities: Identities, subscription: str, session: float
    ) -> None:
        """Of the topics, and of the subscription of each, that are meant."""
        self.reader = reader_name()
        self.identities = identities
        self.gone = False  # one of them is not there any more, or is another one
        self._remote = remote
        self._subscription = subscription
        self._session = session
        self._taken: list[str] = []  # topics that are ours
        self._lost: str | None = None  # who has it instead
        self._renewing: Future[None] | None = None

    def take(self) -> None:
        """Claim it; who is gone is waited for until its session is, and SubscriptionBusy means one is not."""
        self._renewing = self._remote.start(self._renew, self._remote.client)
        try:
            for topic in list(self.identities):
                self.add(topic, self.identities[topic])
        except BaseException:
            self.release(_CLOSE)
            raise

    def add(self, topic: str, identity: Identity) -> None:
        """Claim it of another topic, too."""
        self.identities[topic] = identity
        self._remote.call(self._take, self._remote.client, topic)
        self._taken.append(topic)

    def drop(self, topic: str) -> None:
        """Go on without a topic that is gone."""
        self._taken = [taken for taken in self._taken if taken != topic]

    def check(self) -> None:
        """Raise ConsumerReplaced if somebody else has taken it meanwhile."""
        if self._lost is not None:
            raise ConsumerReplaced(
                f"{self._lost} has taken over subscription {self._subscription!r}: this query did not renew "
                f"its claim within {self._session:g} s (option sessionTimeout), and has to stop"
            )

    def release(self, timeout: float) -> None:
        """Let others have it at once, or when its session ends if the broker cannot be told in that time."""
        if self._renewing is not None:
            self._renewing.cancel()
            for topic in self._taken:
                release = self._remote.client.release
                with suppress(BrokerError, TimeoutError):
                    self._remote.start(release, topic, self._subscription, self.reader).result(timeout)

    async def claim(self, client: AsyncClient, topic: str) -> Claim:
        """Claim or renew it in one topic, if that and the subscription are those that are meant."""
        meant = self.identities[topic]
        return await client.claim(
            topic,
            self._subscription,
            self.reader,
            session=self._session,
            incarnation=meant.topic,
            subscription_incarnation=meant.subscription,
        )

    async def _take(self, client: AsyncClient, topic: str) -> None:
        claim = await self.claim(client, topic)
        holder = claim.holder
        latest = time.monotonic() + claim.remaining  # its session ends by then, unless it is renewed
        while not claim.granted:
            await asyncio.sleep(min(_LOOK, claim.remaining + 0.01))
            asked = time.monotonic()
            claim = await self.claim(client, topic)
            if not claim.granted and (claim.holder != holder or asked + claim.remaining > latest + _SLACK):
                raise SubscriptionBusy(_busy(claim.holder, self._subscription, topic))

    async def _renew(self, client: AsyncClient) -> None:
        while self._lost is None and not self.gone:
            await asyncio.sleep(self._session / _PER_SESSION)
            for topic in list(self._taken):
                try:
                    claim = await self.claim(client, topic)
                except (TopicNotFound, SubscriptionNotFound):
                    self.gone = True
                    break
                except BrokerError as error:
                    # As long as nobody else takes it, it can still be renewed later.
                    _log.warning(
                        "the claim on subscription %r was not renewed: %s", self._subscription, error
                    )
                    continue
                if not claim.granted:
                    self._lost = claim.holder


def reader_name() -> str:
    """A name for this reader that no other has, and that tells an operator where it runs."""
    return f"{_application()}{os.getpid()}-{secrets.token_hex(4)}"


def _application() -> str:
    """What the names of all readers of one Spark application begin with: they are children of its driver."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100]
    return f"spark-{host}-{os.getppid()}-"


def _busy(holder: str, subscription: str, topic: str) -> str:
    text = f"{holder} reads subscription {subscription!r} of topic {topic!r}: two "
    if holder.startswith(_application()):
        return (
            f"{text}sources cannot drain one subscription, and both are of this Spark application. Stop the "
            "other query, or give this one its own. A frame that is joined with itself is two sources, since "
            "Spark reads it once for each use: call load() for each, with another option 'subscription'"
        )
    return f"{text}queries cannot drain one subscription. Stop the other, or give this one its own"
