"""A streaming job from files into a topic, whose tasks stand still after some rows until a gate is opened.

    python -m tests.pipeline.sink_driver MASTER SERVER TOPIC FOLDER [OPENCOST]

FOLDER has the rows in `rows`, gets the checkpoint, and the pids of the Javas that stand still in `held`; the
gate is a file `gate`. There is a task for each file, or with an OPENCOST of 0 one for each core.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from keylane_spark.session import session
from tests.support.java import SETTINGS

PASS = 1_500  # rows of a task, before it stands still
PATIENCE = 240.0  # seconds
OPTIONS = {
    **SETTINGS,
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    "spark.network.timeout": "60s",
}


def holding(folder: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Lets some rows pass, then waits for the gate."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        passed = 0
        for batch in batches:
            yield batch
            passed += batch.num_rows
            if passed >= PASS and not (folder / "gate").exists():
                java = next(parent for parent in psutil.Process().parents() if parent.name() == "java")
                (folder / "held" / f"{java.pid}").touch()
                end = time.monotonic() + PATIENCE
                while not (folder / "gate").exists():
                    assert time.monotonic() < end
                    time.sleep(0.01)

    return run


def main(master: str, server: str, topic: str, folder: str, cost: str = "1g") -> None:
    """Write what there is to the topic."""
    spark = session("sink", master, **{**OPTIONS, "spark.sql.files.openCostInBytes": cost})
    frame = spark.readStream.schema("key string, value string").parquet(f"{folder}/rows")
    query = (
        frame.mapInArrow(holding(Path(folder)), frame.schema)
        .writeStream.format("keylane")
        .options(server=server, topic=topic, checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
