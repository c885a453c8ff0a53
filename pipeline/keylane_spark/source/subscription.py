"""The subscription of a streaming query: created if there is none, and moved to where the options say."""

from keylane import AsyncClient
from keylane.errors import InvalidArgument, SubscriptionNotFound
from keylane.times import Position, moment
from keylane.types import PartitionOffsets
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import LATEST, wanted
from keylane_spark.source.start import Bounds, at_times, check_partitions, start_in


class QuerySubscription:
    """The subscription of mode cursor that a query is, in each of its topics."""

    def __init__(self, remote: BackgroundClient, options: ReadOptions) -> None:
        assert options.subscription is not None
        self.name = options.subscription
        self._remote = remote
        self._options = options

    def create(self, topic: str, start: Position | None = None) -> bool:
        """Create it unless it exists, at `start` or where the options say; whether it had to be created."""
        return self._remote.call(self._create, self._remote.client, topic, start or self._start())

    async def _create(self, client: AsyncClient, topic: str, start: Position) -> bool:
        try:
            info = await client.describe_subscription(topic, self.name)
        except SubscriptionNotFound:
            await client.create_subscription(topic, self.name, mode="cursor", start=start, exist_ok=True)
            return True
        if info.mode != "cursor":
            raise InvalidArgument(
                f"subscription {self.name!r} of topic {topic!r} is of mode {info.mode}, whose consumers ack "
                "message by message: give the query a subscription of its own"
            )
        return False

    def move(self, topic: str, partition: int, position: int) -> None:
        """Move it to a position."""
        target = f"{partition}:0-{position}"  # as an id; the ledger does not matter
        self._remote.call(self._remote.client.seek, topic, self.name, target)

    def first_position(self, topic: str, said: PartitionOffsets, partitions: int, *, new: bool) -> int:
        """Where to start in a partition: what startingOffsets says only ever moves it forward."""
        bounds, start, since = Bounds(said), self._options.start, self._options.since
        if since is not None:
            check_partitions(since.option, since, topic, partitions)
            (at,) = self._remote.call(at_times, self._remote.client, topic, [bounds], since)
            return bounds.floor if at is None else at
        if isinstance(start, str):
            return bounds.floor
        check_partitions("startingOffsets", start, topic, partitions)
        at = wanted(start, topic, said.partition, bounds.floor)
        if not new and (at == LATEST or at < bounds.floor):
            return bounds.floor
        return start_in(topic, bounds, start, fail=self._options.fail_on_data_loss)

    def _start(self) -> Position:
        """Where it starts when it is created; what is asked for by partition is sought then."""
        since, start = self._options.since, self._options.start
        if since is not None:
            return "earliest" if since.everywhere is None else moment(since.everywhere)
        return start if isinstance(start, str) else "earliest"
