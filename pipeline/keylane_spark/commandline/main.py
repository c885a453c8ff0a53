"""`keylane pipeline`: the jobs on Spark. Nothing here loads Spark before a job runs."""

import sys
from typing import Any

import typer

from keylane_spark.commandline.archiving import add_archive, add_replay
from keylane_spark.commandline.auditing import add_audit, add_skew

__all__ = ["main", "pipeline"]

pipeline = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Jobs on Spark: archive topics as Parquet, replay them, audit deliveries, find skew.",
)

add_archive(pipeline)
add_replay(pipeline)
add_audit(pipeline)
add_skew(pipeline)


def main(*words: str, **options: Any) -> None:
    """Run the command line, for `python -m keylane_spark` and jobs/; `words` come before what was typed."""
    pipeline(args=[*words, *sys.argv[1:]], prog_name="keylane pipeline", **options)
