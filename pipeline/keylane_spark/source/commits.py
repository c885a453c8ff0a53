"""How far a query has read, told to the broker in the background, one commit after the other."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from keylane import AsyncClient
from keylane.errors import (
    BrokerError,
    InvalidArgument,
    MessagesLost,
    SubscriptionMoved,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.checkpoint_format import Identities
from keylane_spark.source.claim import SubscriptionClaim
from keylane_spark.source.positions import Positions

_log = logging.getLogger("keylane.spark")


class Commits:
    """The commits of a query on its subscription: what lies before them is drained."""

    def __init__(
        self, remote: BackgroundClient, subscription: str, report_loss: Callable[[str], None]
    ) -> None:
        self._remote = remote
        self._subscription = subscription
        self._report_loss = report_loss
        self._last: tuple[Positions, Identities] = {}, {}
        self._under_way: Future[None] | None = None

    def start(self, claim: SubscriptionClaim, positions: Positions, of: Identities) -> None:
        """Commit these positions, unless they were the last."""
        if (positions, of) != self._last:
            self.finish()
            self._under_way = self._remote.start(self._commit, self._remote.client, claim, positions, of)
            self._last = positions, of

    def check(self) -> None:
        """Raise what went wrong, if the one under way is done."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the one under way; one for which the broker was away is made again later."""
        future, self._under_way = self._under_way, None
        try:
            if future is not None:
                future.result(timeout)
        except SubscriptionMoved as error:
            raise moved_away(str(error).partition(" since ")[0]) from error
        except (TopicNotFound, SubscriptionNotFound, MessagesLost) as error:
            self._report_loss(f"what was read is not drained: {error}")
        except BrokerError as error:
            if not error.retriable:
                raise
            self._last = {}, {}
            _log.warning("subscription %r is drained later: %s", self._subscription, error)

    async def _commit(
        self, client: AsyncClient, claim: SubscriptionClaim, positions: Positions, of: Identities
    ) -> None:
        for topic, at in positions.items():
            commit = partial(
                client.commit,
                topic,
                self._subscription,
                claim.reader,
                at,
                sought={partition: of[topic].moves(partition) for partition in at},
                ledgers=of[topic].ledgers,
                incarnation=of[topic].topic,
                subscription_incarnation=of[topic].subscription,
            )
            try:
                await commit()
            except InvalidArgument:  # the server has lost the claim
                await claim.claim(client, topic)
                await commit()


def moved_away(why: str) -> SubscriptionMoved:
    """The error for a query whose subscription a seek has moved."""
    return SubscriptionMoved(
        f"{why}. Spark's checkpoint cannot follow, and nothing of what the query has read since was "
        "drained: start the query with a new checkpointLocation, and it reads on from there"
    )
