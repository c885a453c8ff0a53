"""What became of every message for every subscription that owed it, and the list of those that are lost."""

from itertools import islice
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.journal import FOREVER, publishes_of
from pipeline.snapshot import local

# States of a stretch. Of these only `lost` is a failure.
SETTLED = "settled"  # acked, committed, dead-lettered or expired
BACKLOG = "backlog"  # not settled yet: in the log, or newer than the first look at it
LET_GO = "let_go"  # the subscription was deleted, or sought past it
NOT_OWED = "not_owed"  # older than the subscription, and no sign that it was still in the log then
LOST = "lost"

REASONS = {
    "missing": "the worker that leased it did not find it in the log",
    "undelivered": "never delivered, and not in the log any more",
    "unsettled": "delivered, not settled, and not in the log any more",
    "passed_over": "in the log, but the subscription has passed it without a delivery",
}


class LostMessage(msgspec.Struct, frozen=True):
    """A message that a subscription was owed and did not get."""

    message_id: str  # its ledger is "?" where its publish is not in the journal
    subscription: str
    partition: int
    entry: int
    reason: str
    published_ms: int | None = None
    key: str | None = None


def judge(stretches: DataFrame, lives: DataFrame, coverage: DataFrame) -> DataFrame:
    """Stretches with partition, subscription, state and, where they are lost, the reason."""
    found = stretches.join(F.broadcast(lives), "number").join(F.broadcast(coverage), "partition")
    settled, delivered = F.col("settled") > 0, F.col("delivered") > 0
    there = F.col("in_log") > 0
    newer = F.col("first") >= F.col("latest")
    over = F.col("ends") < FOREVER
    past = F.col("first") < F.col("owed")
    older = (F.col("first") < F.col("historic")) & (F.col("held") == 0) & ~there
    # With lanes by key the cursor passes what must wait behind others of its key: there it says nothing.
    passed = (
        (F.col("mode") != "key_shared")
        & (F.col("first") < F.col("position"))
        # The position was read before the journal: of one that has moved back since it is not the position
        # any more.
        & (F.col("moved") < F.col("looked"))
    )
    reason = (
        F.when(F.col("lost") > 0, "missing")
        .when(settled | past | over | newer, None)
        .when(there & ~delivered & passed, "passed_over")
        .when(there | older, None)
        .when(delivered, "unsettled")
        .otherwise("undelivered")
    )
    state = (
        F.when(F.col("reason").isNotNull(), LOST)
        .when(settled, SETTLED)
        .when(past | over, LET_GO)
        .when(~there & ~newer, NOT_OWED)
        .otherwise(BACKLOG)
    )
    return found.withColumn("reason", reason).withColumn("state", state)


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
