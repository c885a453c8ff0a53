"""The partitions of all topics, for commands that look at the whole cluster."""

import asyncio

import keylane
from keylane import PartitionInfo
from keylane.errors import TopicNotFound

__all__ = ["all_partitions"]

_TOGETHER = 20  # topics that are asked for at once


async def all_partitions(client: "keylane.AsyncClient") -> dict[str, list[PartitionInfo]]:
    """The partitions of every topic."""
    found: dict[str, list[PartitionInfo]] = {}
    names = sorted(await client.topics())
    for at in range(0, len(names), _TOGETHER):
        some = names[at : at + _TOGETHER]
        answers = await asyncio.gather(*map(client.partitions, some), return_exceptions=True)
        for topic, answer in zip(some, answers, strict=True):
            if isinstance(answer, BaseException):
                if isinstance(answer, TopicNotFound):
                    continue  # gone since
                raise answer
            found[topic] = answer
    return found
