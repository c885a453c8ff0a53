"""`keylane pipeline`: the jobs on Spark. Nothing here loads Spark before a job runs."""

import sys

from keylane.commandline import command
from keylane.commandline.command import new_app
from keylane_spark.commandline.archive import add_archive
from keylane_spark.commandline.audit import add_audit
from keylane_spark.commandline.replay import add_replay
from keylane_spark.commandline.skew import add_skew

__all__ = ["main", "pipeline"]

pipeline = new_app("Jobs on Spark: archive topics as Parquet, replay them, audit deliveries, find skew.")

add_archive(pipeline)
add_replay(pipeline)
add_audit(pipeline)
add_skew(pipeline)


def main(*words: str) -> None:
    """Run the command line, for `python -m keylane_spark` and jobs/; `words` come before what was typed."""
    command.main(pipeline, "keylane pipeline", [*words, *sys.argv[1:]])
