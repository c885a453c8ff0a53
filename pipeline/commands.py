"""`keylane pipeline`: the jobs on Spark. Nothing here loads Spark before a job runs."""

from typing import Any

import typer

__all__ = ["main", "pipeline"]

pipeline = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Jobs on Spark: archive topics as Parquet, replay them, audit deliveries, find skew.",
)


@pipeline.callback()
def _group() -> None:
    """Jobs on Spark: archive topics as Parquet, replay them, audit deliveries, find skew."""


def main(*words: str, **options: Any) -> None:
    """Run the command line, for `python -m pipeline` and spark-submit; `words` come before what was typed."""
    import sys

    pipeline(args=[*words, *sys.argv[1:]], prog_name=" ".join(("keylane pipeline", *words)), **options)
