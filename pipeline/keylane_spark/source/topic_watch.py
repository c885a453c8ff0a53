"""The topics of a query that runs: those that were named, or those that match a pattern from time to time."""

import time

from keylane.types import PartitionOffsets
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.topic_selection import TopicSelection

_LOOK = 1.0  # seconds between two looks for topics that are new


class TopicWatch:
    """What is to be read, by name."""

    def __init__(self, remote: BackgroundClient, selection: TopicSelection) -> None:
        self._remote = remote
        self._selection = selection
        self.names = selection.topics  # as of the last look
        self._looked = float("-inf")

    def look(self) -> list[str]:
        """The topics that were named, or those that match now, unless that was asked a moment ago."""
        if self._selection.pattern is not None and time.monotonic() >= self._looked + _LOOK:
            there = self._remote.call(self._remote.client.topics)
            self.names = [topic for topic in there if self._selection.covers(topic)]
            self._looked = time.monotonic()
        return self.names

    def chosen(self, topic: str, said: list[PartitionOffsets]) -> list[PartitionOffsets]:
        """Those partitions of a topic that are read."""
        return [said[partition] for partition in self._selection.of(topic, len(said))]

    def forget(self, topic: str) -> bool:
        """One is not there; whether that can be, since it only matched before it was deleted."""
        if self._selection.pattern is None:
            return False
        self.names = [name for name in self.names if name != topic]
        return True
