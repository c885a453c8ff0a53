"""`keylane pipeline replay`."""

from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.commandline.typed import parse_time
from keylane.commandline.words import count_of
from keylane_spark.commandline.command import Job, SinceOption, command

__all__ = ["add_replay"]


def add_replay(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "replay")(replay)


def replay(
    job: Job,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Archive folder.", show_default=False)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to.", show_default=False)],
    source: Annotated[
        str | None, typer.Option("--from", metavar="TOPIC", help="Archived topic, if there are several.")
    ] = None,
    run_id: Annotated[
        str, typer.Option(help="Name of the run: the same one resumes, another one starts over.")
    ] = "replay",
    rate: Annotated[float | None, typer.Option(help="Maximum rows per second, all tasks together.")] = None,
    since: SinceOption = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only what was published before this time (UTC by default)."),
    ] = None,
    keys: Annotated[str | None, typer.Option(metavar="A,B,…", help="Only these keys.")] = None,
    durability: Annotated[str | None, typer.Option(help="memory, fsync, replicated or replicated:N.")] = None,
    round_rows: Annotated[int, typer.Option(help="Rows per round; each round is reported.", min=1)] = 250_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be published.")] = False,
    accept_duplicates: Annotated[
        bool,
        typer.Option(
            "--accept-duplicates", help="Resume a round even if the broker may have forgotten its uids."
        ),
    ] = False,
) -> None:
    """Replay an archive: publish its messages to a topic, keeping the order of each key."""
    if rate is not None and rate <= 0:
        raise UsageError(f"--rate {rate:g} is not more than 0")
    first = None if since is None else parse_time(since, "--since")
    end = None if until is None else parse_time(until, "--until")
    if not dry_run:
        job.check_topics(topic)
    job.needs("pyarrow")
    from keylane_spark.archiving.parquet_reader import rows_in_archive

    spark = job.spark("keylane replay", rows_in_archive(path))
    from keylane_spark.replaying.options import ReplayOptions
    from keylane_spark.replaying.replay import run

    options = ReplayOptions(
        server=job.server,
        path=path,
        topic=topic,
        source=source,
        run_id=run_id,
        payloads=job.payloads,
        durability=durability,
        rate=rate,
        since=first,
        until=end,
        keys=keys.split(",") if keys is not None else None,
        round_rows=round_rows,
        dry_run=dry_run,
        accept_duplicates=accept_duplicates,
    )
    result = run(spark, options, job.note)
    if result.dry_run:
        job.say(
            result, f"would replay {count_of(result.rows, 'row')} of {result.source!r} to {result.topic!r}"
        )
        return
    extra = f", {result.duplicates:,} were published before" if result.duplicates else ""
    rows = count_of(result.stored, "row")
    job.say(result, f"replayed {rows} of {result.source!r} to {topic!r} in {result.seconds:g} s{extra}")
