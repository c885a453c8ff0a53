"""Rows of an archive published by Spark, in order and no faster than allowed."""

import tempfile
from pathlib import Path

import msgspec
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from keylane import Tally
from keylane_spark.replaying.options import ReplayOptions
from keylane_spark.replaying.rounds import ORDER
from keylane_spark.sink.pace import DUE

REPLAYED_FROM = "keylane-replayed-from"
_TASK = "_task"


def publish_round(
    rows: DataFrame, count: int, options: ReplayOptions, source: str, *, until: float, again: bool
) -> Tally:
    """Publish the rows of a round: a task has whole keys, in the order of time.

    Nothing that may have been published before is published after `until`: all of it if it runs `again`.
    """
    tasks = rows.sparkSession.sparkContext.defaultParallelism
    rows = rows.withColumn(_TASK, F.pmod(F.hash(F.coalesce("key", "message_id")), F.lit(tasks)))
    order = [*ORDER]
    extra: list[Column] = []
    if options.rate is not None:
        # Every task takes as long as the whole round is to take.
        seconds = count / options.rate
        place = F.row_number().over(Window.partitionBy(_TASK).orderBy(*ORDER)) - 1
        total = F.count(F.lit(1)).over(Window.partitionBy(_TASK))
        rows = rows.withColumn(DUE, place / total * seconds)
        order, extra = [DUE, *ORDER], [F.col(DUE)]
    rows = rows.repartitionById(tasks, F.col(_TASK)).sortWithinPartitions(*order)
    own = {"_until": str(until)}
    own |= {"_again": "true"} if again else {}
    own |= {"_paced": "true"} if extra else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        sink = rows.select("key", "value", _attributes(), _uid(options, source), *extra).write.format(
            "keylane"
        )
        sink.options(**_target(options), **own, _report=str(report)).mode("append").save()
        told = msgspec.json.decode(report.read_bytes(), type=dict[str, Tally])
    return told.get(options.topic, Tally())


def _attributes() -> Column:
    """Those that a message had, and where it comes from."""
    before = F.map_filter(F.col("attributes"), lambda name, _: name != REPLAYED_FROM)
    origin = F.create_map(F.lit(REPLAYED_FROM), F.col("message_id"))
    return F.coalesce(F.map_concat(before, origin), origin).alias("attributes")


def _uid(options: ReplayOptions, source: str) -> Column:
    """The same whenever a message is replayed into the topic by the same run."""
    parts = [F.lit(text) for text in (options.run_id, options.topic, source)]
    parts += [F.col("message_id"), F.unix_micros("timestamp").cast("string")]  # a topic may be made anew
    return F.substring(F.sha2(F.concat_ws("\0", *parts), 256), 1, 32).alias("uid")


def _target(options: ReplayOptions) -> dict[str, str]:
    given = {
        "server": options.server,
        "topic": options.topic,
        "token": options.token,
        "payloads": options.payloads,
        "durability": options.durability,
    }
    return {name: value for name, value in given.items() if value is not None}
