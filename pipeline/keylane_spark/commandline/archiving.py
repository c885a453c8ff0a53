"""`keylane pipeline archive` and `keylane pipeline replay`."""

import signal
from typing import Annotated, Any

import typer

from keylane_spark.commandline.command import Job, Usage, command, moment

__all__ = ["add_archive", "add_replay"]

MEGABYTE = 1024 * 1024


def add_archive(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "archive")(archive)


def add_replay(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "replay")(replay)


def archive(
    job: Job,
    to: Annotated[str, typer.Option(metavar="PATH", help="The archive: a folder, or hdfs:, s3a: ….")],
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC…", help="What to archive.", show_default=False)
    ] = None,
    subscription: Annotated[str, typer.Option(help="Keeps what is not archived yet.")] = "archive",
    starting: Annotated[
        str, typer.Option(help="earliest or latest, where the subscription is made.")
    ] = "earliest",
    interval: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Go on, with a batch so often.", min=0)
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Rows of a batch, at most.", min=1)] = 1_000_000,
    compact: Annotated[bool, typer.Option("--compact", help="Only merge small files.")] = False,
    compact_every: Annotated[
        int, typer.Option(metavar="BATCHES", help="Merge small files so often; 0 is never.", min=0)
    ] = 20,
    file_size: Annotated[int, typer.Option(metavar="MB", help="Of merged files.", min=1)] = 128,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on where messages or bodies are gone from the broker.")
    ] = False,
) -> None:
    """Archive topics as Parquet, by topic and date; without --interval what there is now."""
    if compact == bool(topics):
        raise Usage(
            "name the topics to archive, or merge the files of an archive with --compact, without topics"
        )
    target = file_size * MEGABYTE
    waiting = None
    if topics:
        from keylane_spark.archiving.locks import check_writer

        check_writer(to, subscription, topics)  # before Java starts
        waiting = job.check_topics(*topics)
    spark = job.spark("keylane archive", waiting if interval is None else None)
    from keylane_spark.archiving.compaction import Limits

    if compact:
        from keylane_spark.archiving.compaction import compact as merge

        done = merge(spark, to, Limits(target, 2), job.progress)
        job.say(done, f"{done.merged} files became {done.compactions}, {done.rows:,} rows")
        return
    from keylane_spark.archiving.archive import Options, run

    options = Options(
        server=job.server,
        topics=topics or [],
        path=to,
        subscription=subscription,
        payloads=job.payloads,
        starting=starting,
        batch_rows=batch_rows,
        interval=interval,
        compact_every=compact_every,
        limits=Limits(target),
        fail_on_data_loss=not skip_lost,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    result = run(spark, options, job.progress)
    merged = f"; {result.merged} small files became {result.compactions}" if result.compactions else ""
    job.say(
        result, f"archived {result.rows:,} rows in {result.files} files, {result.batches} batches{merged}"
    )


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def replay(
    job: Job,
    path: Annotated[str, typer.Argument(metavar="PATH", help="The archive.", show_default=False)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where to publish.", show_default=False)],
    source: Annotated[
        str | None, typer.Option("--from", metavar="TOPIC", help="The archived topic, if there are several.")
    ] = None,
    run_id: Annotated[
        str, typer.Option(help="A run of this name goes on where it was; another name begins anew.")
    ] = "replay",
    rate: Annotated[float | None, typer.Option(help="Rows a second, of all tasks together.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only what was published from then on; UTC unless it says."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only what was published before; UTC unless it says.")
    ] = None,
    keys: Annotated[str | None, typer.Option(metavar="A,B,…", help="Only these keys.")] = None,
    durability: Annotated[str | None, typer.Option(help="memory, fsync, replicated or replicated:N.")] = None,
    round_rows: Annotated[int, typer.Option(help="Rows between two lines of progress.", min=1)] = 250_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much it would be.")] = False,
    accept_duplicates: Annotated[
        bool,
        typer.Option("--accept-duplicates", help="Go on with a round that the broker may have forgotten."),
    ] = False,
) -> None:
    """Publish what is archived to a topic, the order of each key as it was."""
    if rate is not None and rate <= 0:
        raise Usage(f"--rate {rate:g}: it must be more than 0")
    moments = [moment("--since", since), moment("--until", until)]
    if not dry_run:
        job.check_topics(topic)
    job.needs("pyarrow")
    from keylane_spark.archiving.parquet_reader import rows_in_archive

    spark = job.spark("keylane replay", rows_in_archive(path))
    from keylane_spark.archiving.replay import Options, run

    options = Options(
        server=job.server,
        path=path,
        topic=topic,
        source=source,
        run_id=run_id,
        payloads=job.payloads,
        durability=durability,
        rate=rate,
        since=moments[0],
        until=moments[1],
        keys=keys.split(",") if keys is not None else None,
        round_rows=round_rows,
        dry_run=dry_run,
        accept_duplicates=accept_duplicates,
    )
    result = run(spark, options, job.progress)
    if result.dry_run:
        job.say(result, f"{result.rows:,} rows of {result.source!r} would go to {result.topic!r}")
        return
    extra = f", {result.duplicates:,} were there already" if result.duplicates else ""
    job.say(
        result,
        f"replayed {result.stored:,} rows of {result.source!r} to {topic!r} in {result.seconds:g} s{extra}",
    )
