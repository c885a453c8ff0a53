"""What became of every message for every subscription that owed it, and the list of those that are lost."""

from itertools import islice
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from keylane_spark.auditing.findings import LostMessage
from keylane_spark.auditing.rules import LOST, reason_of, state_of
from keylane_spark.auditing.with_spark.lives import publishes_of
from keylane_spark.auditing.with_spark.snapshot import local


class _Row:
    """The columns of a frame as attributes."""

    def __getattr__(self, name: str) -> Column:
        return F.col(name)


def _choose(*cases: tuple[Column, str], otherwise: str) -> Column:
    (condition, value), *others = cases
    chosen = F.when(condition, value)
    for condition, value in others:
        chosen = chosen.when(condition, value)
    return chosen.otherwise(otherwise)


def judge(stretches: DataFrame, lives: DataFrame, coverage: DataFrame) -> DataFrame:
    """Stretches with partition, subscription, state and, where they are lost, the reason."""
    found = stretches.join(F.broadcast(lives), "number").join(F.broadcast(coverage), "partition")
    judged = found.withColumn("reason", reason_of(_Row(), _choose))
    return judged.withColumn("state", state_of(_Row(), _choose))


def list_lost(judged: DataFrame, journal: DataFrame, cap: int) -> list[LostMessage]:
    """The first so many lost messages, by partition and entry."""
    lost = judged.where(F.col("state") == LOST).orderBy("partition", "first", "subscription")
    entries = some_entries(lost.select("partition", "first", "last", "subscription", "reason"), cap)
    published = publishes_of(journal, [(partition, entry) for partition, entry, *_ in entries])
    found = []
    for partition, entry, subscription, reason in entries:
        ledger, at = published.get((partition, entry), ("?", None))
        message_id = f"{partition}:{ledger}-{entry}"
        found.append(LostMessage(message_id, subscription, partition, entry, reason, at))
    return found


def some_entries(stretches: DataFrame, cap: int) -> list[tuple[Any, ...]]:
    """The first entries of stretches (partition, first, last, …), at most `cap`: (partition, entry, …)."""
    rows = stretches.limit(cap).collect()
    each = ((row[0], entry, *row[3:]) for row in rows for entry in range(row[1], row[2] + 1))
    return list(islice(each, cap))


def with_keys(lost: list[LostMessage], *sources: DataFrame) -> list[LostMessage]:
    """The same with their keys, as far as the log or the archive has them (partition, offset, key)."""
    keys: dict[tuple[int, int], str] = {}
    for source in sources if lost else ():
        places = sorted({(message.partition, message.entry) for message in lost})
        wanted = local(source.sparkSession, places, "partition int, offset long")
        found = source.join(F.broadcast(wanted), ["partition", "offset"]).where(F.col("key").isNotNull())
        keys |= {
            (row.partition, row.offset): row.key
            for row in found.select("partition", "offset", "key").collect()
        }
    return [
        msgspec.structs.replace(message, key=keys.get((message.partition, message.entry))) for message in lost
    ]
