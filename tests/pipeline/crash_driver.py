"""A streaming job that stands still at a chosen moment of its second batch, to be killed there.

Each batch is written into a folder of its own, which a batch that runs again overwrites: so the folders
together hold every message exactly once if the source gives the same batch again, and none twice.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pyspark.sql import DataFrame
from pyspark.sql.functions import udf

from keylane_spark.session import session
from tests.support.java import SETTINGS

MOMENTS = ("planned", "reading", "written", "committed", "never")
ROWS = 100  # of a task that pass before it stands still


def stand_still() -> None:
    """Wait for the end."""
    while True:
        time.sleep(60)


def holding_up(marker: Path, *, once: bool) -> Callable[[int], bool]:
    """What lets some rows of a task pass and then says which Java runs it, and stands still."""
    passed = 0

    def hold(offset: int) -> bool:
        nonlocal passed
        passed += 1
        if passed == ROWS and not (once and marker.exists()):
            java = next(parent for parent in psutil.Process().parents() if parent.name() == "java")
            part = marker.with_suffix(f".{os.getpid()}")
            part.write_text(str(java.pid))
            part.rename(marker)
            while True:
                time.sleep(60)
        return True

    return hold


def main(master: str, server: str, topic: str, folder: str, moment: str) -> None:
    """Read until there is no more, or until killed."""
    assert moment in MOMENTS
    marker, seen = Path(folder) / "marker", list[int]()
    # An executor that was killed is missed after this.
    spark = session("crash", master, **SETTINGS, **{"spark.network.timeout": "60s"})
    frame = (
        spark.readStream.format("keylane")
        .options(server=server, subscribe=topic, subscription="spark", sessionTimeout="5")
        .option("maxOffsetsPerTrigger", "2000")
        .load()
    )

    def write(batch: DataFrame, number: int) -> None:
        seen.append(number)
        here = moment if len(seen) == 2 else "never"
        if here == "planned":
            marker.touch()
            stand_still()
        if here == "reading":
            hold = udf(holding_up(marker, once=not master.startswith("local[")), "boolean")
            batch = batch.where(hold(batch["offset"]))
        batch.write.mode("overwrite").parquet(f"{folder}/rows/batch={number}")
        if here == "written":
            marker.touch()
            stand_still()
        if here == "committed":
            marker.touch()
            while not marker.with_name("go").exists():
                time.sleep(0.01)

    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
