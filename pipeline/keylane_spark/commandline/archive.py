"""`keylane pipeline archive`."""

import signal
from typing import Annotated, Any

import typer

from keylane.commandline.output import UsageError
from keylane.commandline.words import count_of
from keylane_spark.commandline.command import Job, command

__all__ = ["add_archive"]

MEGABYTE = 1024 * 1024
WORDING = {  # flags of this command, where the data source names its options
    "set option failOnDataLoss to false": "use --skip-lost",
    "Start the query with a new checkpointLocation to read": "Use another --to folder to archive",
    "start the query with a new checkpointLocation, and it reads on from there": "use another --to folder",
}


def add_archive(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "archive")(archive)


def archive(
    job: Job,
    to: Annotated[str, typer.Option(metavar="PATH", help="Archive folder, local or on hdfs:, s3a: ….")],
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Topics to archive.", show_default=False)
    ] = None,
    subscription: Annotated[
        str, typer.Option(help="Subscription that keeps what is not archived yet.")
    ] = "archive",
    starting: Annotated[
        str, typer.Option(help="Start of a new subscription: earliest or latest.")
    ] = "earliest",
    interval: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Keep running, with a batch every N seconds.", min=0),
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Maximum rows per batch.", min=1)] = 1_000_000,
    compact: Annotated[bool, typer.Option("--compact", help="Merge small files and exit.")] = False,
    compact_every: Annotated[
        int, typer.Option(metavar="BATCHES", help="Merge every N batches; 0 disables.", min=0)
    ] = 20,
    file_size: Annotated[int, typer.Option(metavar="MB", help="Target size of merged files.", min=1)] = 128,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Continue where the broker has lost messages or bodies.")
    ] = False,
) -> None:
    """Archive topics as Parquet, by topic and date: what there is now, or with --interval continuously."""
    if compact == bool(topics):
        raise UsageError(
            "give the topics to archive, or --compact without topics to merge the files of an archive"
        )
    job.wording = WORDING
    job.check_folder(to)
    target = file_size * MEGABYTE
    waiting = None
    if topics:
        from keylane_spark.archiving.locks import check_writer

        check_writer(to, subscription, topics)  # before Java starts
        waiting = job.check_topics(*topics)
    spark = job.spark("keylane archive", waiting if interval is None else None)
    from keylane_spark.archiving.compaction import MergeLimits

    if compact:
        from keylane_spark.archiving.compaction import compact as merge

        done = merge(spark, to, MergeLimits(target, 2), job.note)
        job.say(
            done,
            f"merged {count_of(done.merged, 'file')} into {done.compactions}, {count_of(done.rows, 'row')}",
        )
        return
    from keylane_spark.archiving.archive import ArchiveOptions, run

    options = ArchiveOptions(
        server=job.server,
        topics=topics or [],
        path=to,
        subscription=subscription,
        payloads=job.payloads,
        starting=starting,
        batch_rows=batch_rows,
        interval=interval,
        compact_every=compact_every,
        limits=MergeLimits(target),
        fail_on_data_loss=not skip_lost,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    result = run(spark, options, job.note)
    merged = (
        f"; merged {count_of(result.merged, 'small file')} into {result.compactions}"
        if result.compactions
        else ""
    )
    rows, files, batches = (
        count_of(number, noun)
        for number, noun in ((result.rows, "row"), (result.files, "file"), (result.batches, "batch"))
    )
    job.say(result, f"archived {rows} in {files}, {batches}{merged}")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
