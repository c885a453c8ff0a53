"""`keylane pipeline audit`."""

from functools import partial
from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.commandline.typed import parse_time
from keylane.commandline.words import count_of
from keylane_spark.auditing.findings import STATUS, Audit
from keylane_spark.commandline.command import Job, SinceOption, TopicArgument, command

__all__ = ["add_audit"]


def add_audit(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "audit")(audit)


def audit(
    job: Job,
    topic: TopicArgument,
    out: Annotated[
        str, typer.Option(metavar="PATH", help="Folder for snapshot and report, local or on hdfs:, s3a: ….")
    ] = "audit",
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Judge the snapshot of an earlier audit again.", show_default=False
        ),
    ] = None,
    archive: Annotated[
        str | None, typer.Option(metavar="PATH", help="Also check this archive.", show_default=False)
    ] = None,
    archive_subscription: Annotated[
        str, typer.Option(metavar="NAME", help="Subscription of the archive.")
    ] = "archive",
    since: SinceOption = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", help="Check the bodies of about N messages.", show_default="all", min=1),
    ] = None,
    no_bodies: Annotated[bool, typer.Option("--no-bodies", help="Do not check bodies.")] = False,
) -> None:
    """Audit a topic: prove that every message was delivered. Exit: 0 complete, 1 incomplete, 3 unproven."""
    start = None if since is None else parse_time(since, "--since")
    if no_bodies and sample is not None:
        raise UsageError("give --sample or --no-bodies, not both")
    job.check_folder(out)
    job.needs("pyarrow", "matplotlib")
    from keylane_spark.auditing.audit import SMALL, WITH_SPARK, AuditOptions, run
    from keylane_spark.auditing.report import write_audit

    if journal is None:
        job.note(f"reading the log and the journal of {topic} into {out}")
    options = AuditOptions(
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


def _told(found: Audit, out: str) -> str:
    """The audit in a few lines."""
    lines = [f"{found.topic}: {found.verdict}", *(f"  {why}" for why in found.why)]
    for one in found.subscriptions:
        lines.append(
            f"  {one.name}: {count_of(one.messages, 'message')}, {one.settled:,} settled, "
            f"{one.backlog:,} in the backlog, {one.duplicates:,} delivered more than once, {one.lost:,} lost"
        )
    lines += [f"  lost: {message.message_id} for {message.subscription}" for message in found.lost[:20]]
    if found.lost_total > 20:
        lines.append(f"  lost: {found.lost_total - 20:,} more")
    return "\n".join([*lines, f"  report: {out}/audit.html, {out}/audit.json"])
