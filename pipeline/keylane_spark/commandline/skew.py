"""`keylane pipeline skew`."""

from typing import Annotated

import typer

from keylane.commandline.words import count_of
from keylane_spark.commandline.command import Job, TopicArgument, command

__all__ = ["add_skew"]


def add_skew(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "skew")(skew)


def skew(
    job: Job,
    topic: TopicArgument,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Folder for report and plan.")] = "skew",
    archive: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Read this archive instead of the log.", show_default=False),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Take rates from the snapshot of an audit.", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of hot keys to list.", min=1, max=1_000)] = 20,
) -> None:
    """Find skew: hot keys and partitions; writes a plan for `keylane rebalance --plan`."""
    job.check_folder(out)
    waiting = job.check_topics(topic)
    spark = job.spark("keylane skew", waiting if archive is None and journal is None else None)
    from keylane_spark.files import files_at
    from keylane_spark.skew.report import write_skew
    from keylane_spark.skew.skew import run

    found = run(spark, topic, job.connection, archive=archive, journal=journal, top=top)
    write_skew(found, out, files_at(out, spark))
    lines = [f"{topic}: {count_of(found.messages, 'message')}, {count_of(found.keys, 'key')}"]
    lines += [f"  {one}" for one in found.advice]
    lines += [f"  hot: {key.key} {key.share:.1%}" for key in found.hot_keys[:5]]
    job.say(found, "\n".join([*lines, f"  report: {out}/skew.html; plan: {out}/plan.json"]))
