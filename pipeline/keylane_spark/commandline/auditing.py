"""`keylane pipeline audit` and `keylane pipeline skew`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from keylane_spark.commandline.command import Job, Usage, command, moment

if TYPE_CHECKING:
    from keylane_spark.auditing.findings import Audit

__all__ = ["add_audit", "add_skew"]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]


def add_audit(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "audit")(audit)


def add_skew(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "skew")(skew)


def audit(
    job: Job,
    topic: TopicArgument,
    out: Annotated[
        str, typer.Option(metavar="PATH", help="For snapshot and report: a folder, or hdfs:, s3a: ….")
    ] = "audit",
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Use the snapshot that an earlier audit wrote.", show_default=False
        ),
    ] = None,
    archive: Annotated[
        str | None, typer.Option(metavar="PATH", help="Check this archive, too.", show_default=False)
    ] = None,
    archive_subscription: Annotated[
        str, typer.Option(metavar="NAME", help="The subscription that the archive is made with.")
    ] = "archive",
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only what was published from then on; UTC unless it says.",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", help="Look for the bodies of about so many.", show_default="all", min=1),
    ] = None,
    no_bodies: Annotated[bool, typer.Option("--no-bodies", help="Do not look for bodies.")] = False,
) -> None:
    """Prove that every message was delivered; ends with 0: complete, 1: incomplete, 3: unproven."""
    start = moment("--since", since)
    if no_bodies and sample is not None:
        raise Usage("give one of --sample and --no-bodies")
    job.needs("pyarrow", "matplotlib")
    from keylane_spark.auditing.audit import SMALL, WITH_SPARK, Options, run
    from keylane_spark.auditing.findings import STATUS
    from keylane_spark.auditing.report import write_audit

    if journal is None:
        job.progress(f"reading the log and the journal of {topic} into {out}")
    options = Options(
        topic=topic,
        out=out,
        connection=job.connection,
        journal=journal,
        archive=archive,
        archive_subscription=archive_subscription,
        since=start,
        sample=0 if no_bodies else sample,
        small=WITH_SPARK if job.master else SMALL,
    )
    found, files = run(options, partial(job.spark, "keylane audit"))
    write_audit(found, out, files)
    job.say(found, _told(found, out))
    if status := STATUS[found.verdict]:
        raise typer.Exit(status)


def skew(
    job: Job,
    topic: TopicArgument,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="For report and plan.")] = "skew",
    archive: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Look at this archive instead of the log.", show_default=False),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Rates from the snapshot of an audit.", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(help="Hot keys to name.", min=1, max=1_000)] = 20,
) -> None:
    """Find hot keys and partitions; writes a plan for `keylane rebalance --plan`."""
    waiting = job.check_topics(topic)
    spark = job.spark("keylane skew", waiting if archive is None and journal is None else None)
    from keylane_spark.files import files_at
    from keylane_spark.skew.report import write_skew
    from keylane_spark.skew.skew import run

    found = run(spark, topic, job.connection, archive=archive, journal=journal, top=top)
    write_skew(found, out, files_at(out, spark))
    lines = [f"{topic}: {found.messages:,} messages, {found.keys:,} keys"]
    lines += [f"  {one}" for one in found.advice]
    lines += [f"  hot: {key.key} {key.share:.1%}" for key in found.hot_keys[:5]]
    job.say(found, "\n".join([*lines, f"  report: {out}/skew.html; plan: {out}/plan.json"]))


def _told(found: "Audit", out: str) -> str:
    """The audit in a few lines."""
    lines = [f"{found.topic}: {found.verdict}", *(f"  {why}" for why in found.why)]
    for one in found.subscriptions:
        lines.append(
            f"  {one.name}: {one.messages:,} messages, {one.settled:,} settled, "
            f"{one.backlog:,} in the backlog, {one.duplicates:,} delivered more than once, {one.lost:,} lost"
        )
    lines += [f"  lost: {message.message_id} for {message.subscription}" for message in found.lost[:20]]
    if found.lost_total > 20:
        lines.append(f"  lost: {found.lost_total - 20:,} more")
    return "\n".join([*lines, f"  report: {out}/audit.html, {out}/audit.json"])
