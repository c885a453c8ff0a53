"""The rounds of a replay: an archive's rows in the order of time, cut by number of rows.

Within a partition rows are ordered by ledger and offset, and their times never go back; a topic that was made
anew begins again with offset 1, in newer ledgers and perhaps with another number of partitions, where a key
may be in another one. So the order of time, and then of ledger and offset, is that of every partition and of
every key, over all the topics that had the name.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from keylane.errors import InvalidArgument

LEDGER = "_ledger"
ORDER = ("timestamp", LEDGER, "partition", "offset")

_FEW = 50_000  # rows of which each may be the last of a round
_SHARES = 64  # of a round: the steps in which it grows


class Stretch(msgspec.Struct, frozen=True):
    """What there is of a ledger of a partition; times are microseconds since 1970."""

    partition: int
    ledger: int
    last: int  # offset
    began: int
    ended: int
    rows: int


class Cut(NamedTuple):
    """The last row of a round."""

    micros: int  # its time
    ledger: int
    partition: int
    offset: int


class Found(NamedTuple):
    """What the archive has of a round at this moment."""

    rows: int
    messages: int  # without those that are archived twice


def with_ledger(frame: DataFrame) -> DataFrame:
    """Rows of an archive with the ledger, which is in the message's id."""
    number = F.regexp_extract("message_id", r"^\d+:(\d+)-\d+$", 1)
    return frame.withColumn(LEDGER, F.when(number != "", number).cast("long"))


def stretches_of(frame: DataFrame) -> list[Stretch]:
    """What there is of each ledger, by partition; InvalidArgument if that is no order of time."""
    time = F.unix_micros("timestamp")
    found = frame.groupBy("partition", LEDGER).agg(
        F.max("offset").alias("last"),
        F.min(time).alias("began"),
        F.max(time).alias("ended"),
        F.count(F.lit(1)).alias("rows"),
    )
    rows = found.collect()
    if any(value is None for row in rows for value in row):
        raise InvalidArgument(
            "the archive has rows without partition, offset, time or id: Keylane did not write them"
        )
    stretches = [Stretch(**{("ledger" if n == LEDGER else n): row[n] for n in found.columns}) for row in rows]
    return in_order(stretches)


def in_order(stretches: Iterable[Stretch]) -> list[Stretch]:
    """By partition and ledger; InvalidArgument if a newer ledger of a partition has older messages."""
    ordered = sorted(stretches, key=lambda item: (item.partition, item.ledger))
    for before, after in pairwise(ordered):
        if before.partition == after.partition and after.began < before.ended:
            raise InvalidArgument(
                f"in partition {after.partition} messages of ledger {after.ledger} are older than some of "
                f"ledger {before.ledger}, which came first: the clock went back, and no single order fits "
                f"every key. Replay what was published before {_text(after.began)} and the rest one after "
                "the other, with --since, --until and a --run-id each"
            )
    return ordered


def last_of(stretches: Sequence[Stretch]) -> dict[int, tuple[int, int]]:
    """The ledger and offset with which each partition ends."""
    return {item.partition: (item.ledger, item.last) for item in stretches}


def rounds_of(frame: DataFrame, rows: int, most: int) -> list[tuple[Cut, int]]:
    """Where rounds end, each of `most` messages or a little less, and how many: one archived twice is one."""
    step = 1 if rows <= _FEW else max(1, most // _SHARES)
    tasks = max(1, min(frame.sparkSession.sparkContext.defaultParallelism, rows // _FEW + 1))
    place = F.monotonically_increasing_id()  # of the task, and from its 34th bit on of the row in it
    sorted_rows = (
        frame.select(*ORDER).distinct().repartitionByRange(tasks, *ORDER).sortWithinPartitions(*ORDER)
    ).withColumn("place", place)
    task, row = F.shiftright("place", 33), F.col("place").bitwiseAND((1 << 33) - 1)
    micros = F.unix_micros("timestamp")
    steps = sorted_rows.groupBy(task.alias("task"), F.floor(row / step).alias("step")).agg(
        F.count(F.lit(1)).alias("rows"),
        F.max(F.struct(micros.alias("at"), LEDGER, "partition", "offset")).alias("end"),
    )
    found = sorted((Cut(*item["end"]), item["rows"]) for item in steps.collect())
    return gather(found, most)


def found_in(rows: DataFrame) -> Found:
    """Count the rows of a round."""
    [counts] = rows.agg(F.count(F.lit(1)), F.count_distinct(*ORDER)).collect()
    return Found(*counts)


def gather(steps: Sequence[tuple[Cut, int]], most: int) -> list[tuple[Cut, int]]:
    """Put steps together to rounds of at most so many rows, as even as can be.

    >>> [(cut.offset, rows) for cut, rows in gather([(Cut(at, 1, 0, at), 2) for at in range(5)], 4)]
    [(1, 4), (3, 4), (4, 2)]
    """
    total = sum(rows for _, rows in steps)
    size = -(-total // max(1, -(-total // most)))  # of so few rounds, the same for all
    rounds: list[tuple[Cut, int]] = []
    filled = 0
    for place, (cut, rows) in enumerate(steps):
        filled += rows
        if place + 1 == len(steps) or filled + steps[place + 1][1] > size:
            rounds.append((cut, filled))
            filled = 0
    return rounds


def between(after: Cut | None, upto: Cut, last: dict[int, tuple[int, int]]) -> Column:
    """The rows of a round, of those that the archive had when the run began."""
    key = _longs(F.unix_micros("timestamp"), *map(F.col, ORDER[1:]))
    chosen = (key <= _longs(*map(F.lit, upto))) & _until(upto.micros, "<=")
    if after is not None:
        chosen &= (key > _longs(*map(F.lit, after))) & _until(after.micros, ">=")
    known, place = F.lit(False), _longs(F.col(LEDGER), F.col("offset"))
    for partition, end in last.items():
        known |= (F.col("partition") == partition) & (place <= _longs(*map(F.lit, end)))
    return chosen & known


def _longs(*columns: Column) -> Column:
    """Several as one, which is compared by the first of them, then by the second, …."""
    return F.struct(*(column.cast("long") for column in columns))


def _until(micros: int, than: str) -> Column:
    """The same for time and date alone, which spares files and parts of files."""
    day = F.lit(datetime.fromtimestamp(micros // 1_000_000, UTC).date())
    time = F.timestamp_micros(F.lit(micros))
    if than == "<=":
        return (F.col("date") <= day) & (F.col("timestamp") <= time)
    return (F.col("date") >= day) & (F.col("timestamp") >= time)


def _text(micros: int) -> str:
    return f"{datetime.fromtimestamp(micros / 1e6, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
