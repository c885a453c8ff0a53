"""The partitions of all topics, for commands that look at the whole cluster."""

import keylane
from keylane import PartitionInfo
from keylane.errors import TopicNotFound

__all__ = ["all_partitions"]


async def all_partitions(client: "keylane.AsyncClient") -> dict[str, list[PartitionInfo]]:
    """The partitions of every topic."""
    found = {}
    for topic in sorted(await client.topics()):
        try:
            found[topic] = await client.partitions(topic)
        except TopicNotFound:
            continue  # gone since
    return found
