"""A topic as an audit sees it: where everything is, then the log, then the journal, in this order.

The order is what makes a live topic safe to look at. Whatever was published before the first look, and is not
settled where the journal ends, had to be in the log at every moment between the two: so also when the log was
read. What is newer than the first look is not judged. And records that were still there after the journal had
been read were there all the time, so none is missing between them.
"""

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from client import Client
from client.errors import SubscriptionNotFound
from pipeline.commandline import Trouble

ABOUT = "snapshot.json"
JOURNAL = "journal"
LOG = "log"


class PartitionState(msgspec.Struct, frozen=True):
    """Where a partition's log and journal begin and end; positions are the next entry or record."""

    partition: int
    earliest: int
    latest: int
    journal_earliest: int  # after the journal had been read
    journal_latest: int  # before


class SubscriptionState(msgspec.Struct, frozen=True):
    """How far a subscription was, by partition."""

    name: str
    mode: str
    positions: list[int | None]  # None: not there, as while it is being made


class Snapshot(msgspec.Struct, frozen=True):
    """What was asked of the broker."""

    topic: str
    taken_at: datetime
    journal: int  # records to keep by partition, 0: it is off
    partitions: list[PartitionState]
    subscriptions: list[SubscriptionState]


def take(spark: SparkSession, server: str, topic: str, out: Path) -> Snapshot:
    """Write the log and the journal of a topic to a folder, with what else is to be known of it."""
    prepare(out)
    with Client(server) as client:
        about = client.describe_topic(topic)
        first_look = client.offsets(topic)
        subscriptions = [_state(client, topic, name) for name in sorted(about.subscriptions)]
        # Parquet has no room for what was never there: an empty log is written with its columns all the same.
        log = _read(spark, server, topic, includeValue="false")
        log.select("partition", "offset", "key", "message_id").write.parquet(str(out / LOG))
        journal = _read(spark, server, topic, journal="true", failOnDataLoss="false")
        journal.drop("topic").write.parquet(str(out / JOURNAL))
        last_look = client.offsets(topic)
    if first_look[0].incarnation != last_look[0].incarnation:
        raise Trouble(f"topic {topic!r} was deleted and made anew while it was looked at: try again")
    snapshot = Snapshot(
        topic=topic,
        taken_at=datetime.now(UTC),
        journal=about.journal,
        partitions=[
            PartitionState(
                at.partition,
                at.earliest,
                at.latest,
                last_look[at.partition].journal_earliest,
                at.journal_latest,
            )
            for at in first_look
        ],
        subscriptions=[state for state in subscriptions if state is not None],
    )
    (out / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(snapshot)))
    return snapshot


def load(path: Path) -> tuple[Snapshot, Path]:
    """A snapshot that an earlier audit left, by its folder or that of its journal; and the folder."""
    for folder in (path, path.parent):
        if (folder / ABOUT).is_file():
            return msgspec.json.decode((folder / ABOUT).read_bytes(), type=Snapshot), folder
    raise Trouble(f"no {ABOUT} in {path}: name the folder that an earlier audit has written with --out")


def prepare(out: Path) -> None:
    """Make a folder for a snapshot; one that an earlier audit has filled is emptied of what it wrote."""
    if out.is_dir() and any(out.iterdir()) and not (out / ABOUT).exists():
        raise Trouble(f"{out} is not empty, and not of an earlier audit: name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / ABOUT).write_bytes(b"{}")  # what follows is ours, should it end half-way
    for name in (LOG, JOURNAL):
        shutil.rmtree(out / name, ignore_errors=True)


def journal_of(spark: SparkSession, folder: Path, snapshot: Snapshot) -> DataFrame:
    """The records of a snapshot's journal from which on none is missing."""
    journal = spark.read.parquet(str(folder / JOURNAL))
    late = [state for state in snapshot.partitions if state.journal_earliest > 1]
    if not late:
        return journal
    return journal.where(
        F.col("offset") >= _by_partition({at.partition: at.journal_earliest for at in late}, 1)
    )


def log_of(spark: SparkSession, folder: Path) -> DataFrame:
    """The log of a snapshot: partition, offset, key, message_id."""
    return spark.read.parquet(str(folder / LOG))


def islands(entries: DataFrame) -> DataFrame:
    """Partitions and offsets, some of them perhaps twice, as ranges: partition, first, last."""
    rank = F.dense_rank().over(Window.partitionBy("partition").orderBy("offset"))
    return (
        entries.select("partition", "offset", (F.col("offset") - rank).alias("island"))
        .groupBy("partition", "island")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
        .drop("island")
    )


def local(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: str) -> DataFrame:
    """A small table that is a part of the plan: it costs no job, and no Python process.

    local(spark, [(0, 17)], "partition int, latest long")
    """
    kinds = {"int": pyarrow.int32(), "long": pyarrow.int64(), "string": pyarrow.string()}
    fields = [field.split() for field in schema.split(",")]
    columns = pyarrow.schema([(name, kinds[kind]) for name, kind in fields])
    lines = [dict(zip(columns.names, row, strict=True)) for row in rows]
    return spark.createDataFrame(pyarrow.Table.from_pylist(lines, schema=columns))


def _by_partition(values: dict[int, int], otherwise: int) -> Column:
    pairs = [F.lit(part) for pair in values.items() for part in pair]
    return F.coalesce(F.try_element_at(F.create_map(*pairs), F.col("partition")), F.lit(otherwise))


def _state(client: Client, topic: str, name: str) -> SubscriptionState | None:
    try:
        mode = client.describe_subscription(topic, name).mode
        positions = [at.position for at in client.offsets(topic, name)]
    except SubscriptionNotFound:
        return None  # deleted since; the journal has when
    return SubscriptionState(name, mode, positions)


def _read(spark: SparkSession, server: str, topic: str, **options: Any) -> DataFrame:
    return spark.read.format("keylane").options(server=server, subscribe=topic, **options).load()
