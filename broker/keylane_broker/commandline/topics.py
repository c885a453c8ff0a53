"""`keylane topic`: create, list, describe, change and delete topics."""

from typing import Annotated, Any

import msgspec
import typer

from keylane.commandline.output import UsageError
from keylane.commandline.words import count_of
from keylane.errors import TopicNotFound
from keylane.types import Retention, TopicInfo
from keylane.wire import MAX_INLINE
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.confirming import YesOption, can_ask, confirm

__all__ = ["add_hot_keys", "topics"]

JournalOption = Annotated[
    str | None,
    typer.Option(
        metavar="on|off|N",
        help="Record what happens to each message, keeping N records per partition.",
        show_default=False,
    ),
]

RetentionOption = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|forever",
        help="How long messages stay for replay when every subscription has settled them.",
        show_default=False,
    ),
]
RetentionBytesOption = Annotated[
    int | None,
    typer.Option(metavar="BYTES", help="Maximum bytes of bodies kept for replay.", min=0, show_default=False),
]

TtlOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Lifetime of messages that do not set one.", min=0, show_default=False
    ),
]

QuotaOption = Annotated[
    int | None,
    typer.Option(
        metavar="MESSAGES",
        help="Maximum unsettled messages; beyond it publishing fails.",
        min=0,
        show_default=False,
    ),
]

QuotaBytesOption = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES",
        help="Maximum bytes of unsettled bodies; beyond it publishing fails.",
        min=0,
        show_default=False,
    ),
]

SpreadOption = Annotated[
    int | None,
    typer.Option(
        help="Share of the workers to use: 1 is all, 2 is half of them, up to 8.",
        min=1,
        max=8,
        show_default=False,
    ),
]

topics = typer.Typer(no_args_is_help=True, help="Create, list, describe, change and delete topics.")


@command(topics, "create")
async def create(
    run: BrokerRun,
    topic: TopicArgument,
    partitions: Annotated[
        int | None, typer.Option(help="Number of partitions.", min=1, show_default="the broker's")
    ] = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept a topic that exists.")] = False,
    journal: JournalOption = None,
    dedupe_window: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long a uid is remembered.", min=0, show_default="600"),
    ] = None,
    retention: RetentionOption = None,
    retention_bytes: RetentionBytesOption = None,
    ttl: TtlOption = None,
    backlog_quota: QuotaOption = None,
    backlog_quota_bytes: QuotaBytesOption = None,
    spread: SpreadOption = None,
    inline: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            help="Keep bodies of up to N bytes in the messages.",
            min=0,
            max=MAX_INLINE,
        ),
    ] = 0,
) -> None:
    """Create a topic."""
    records = _records(journal) if journal is not None else False
    async with run.client() as client:
        made = await client.create_topic(
            topic,
            partitions=partitions,
            dedupe_window=dedupe_window,
            exist_ok=exist_ok,
            journal=records,
            retention=None if retention is None else _retention(retention),
            retention_bytes=retention_bytes or None,
            ttl=ttl or None,
            backlog_quota=backlog_quota or None,
            backlog_quota_bytes=backlog_quota_bytes or None,
            spread=spread or 1,
            inline=inline,
        )
    run.say(made, f"topic {topic!r} has {made.partitions} partitions")


@command(topics, "list")
async def list_topics(run: BrokerRun) -> None:
    """List topics."""
    found = []
    async with run.client() as client:
        for name in sorted(await client.topics()):
            try:
                found.append(await client.describe_topic(name))
            except TopicNotFound:
                continue  # gone since
    rows = [(about.name, about.partitions, about.messages, sorted(about.subscriptions)) for about in found]
    run.table(found, ["topic", "partitions", "messages", "subscriptions"], rows)


@command(topics, "describe")
async def describe(run: BrokerRun, topic: TopicArgument) -> None:
    """Describe a topic: its settings, messages, subscriptions and hottest keys."""
    async with run.client() as client:
        about = await client.describe_topic(topic)
        hot = await client.hot_keys(topic, limit=3)
    keys = [f"{found.key} {found.share:.1%}" for found in hot]
    run.properties({**msgspec.to_builtins(about), "hot_keys": keys if not run.json else hot})


def add_hot_keys(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "hot-keys")(hot_keys)


async def hot_keys(
    run: BrokerRun,
    topic: TopicArgument,
    limit: Annotated[int, typer.Option("--max", help="Maximum to show.", min=1)] = 10,
) -> None:
    """List the keys under which most messages of a topic were published lately."""
    async with run.client() as client:
        found = await client.hot_keys(topic, limit=limit)
    rows = [(one.key, f"{one.share:.2%}", f"{one.error:.2%}") for one in found]
    run.table(found, ["key", "share", "error"], rows)


@command(topics, "change")
async def change(
    run: BrokerRun,
    topic: TopicArgument,
    journal: JournalOption = None,
    retention: RetentionOption = None,
    retention_bytes: RetentionBytesOption = None,
    ttl: TtlOption = None,
    backlog_quota: QuotaOption = None,
    backlog_quota_bytes: QuotaBytesOption = None,
    spread: SpreadOption = None,
    dedupe_window: Annotated[
        float | None, typer.Option(help="Seconds that uids are remembered.", min=0, show_default=False)
    ] = None,
) -> None:
    """Change settings of a topic; what is not named stays as it is, and 0 is none.

    A journal starts anew when it is switched on.
    """
    changes: dict[str, Any] = {}
    if journal is not None:
        changes["journal"] = _records(journal)
    if retention is not None:
        changes["retention"] = _retention(retention) or None
    if retention_bytes is not None:
        changes["retention_bytes"] = retention_bytes or None
    if ttl is not None:
        changes["ttl"] = ttl or None
    if backlog_quota is not None:
        changes["backlog_quota"] = backlog_quota or None
    if backlog_quota_bytes is not None:
        changes["backlog_quota_bytes"] = backlog_quota_bytes or None
    if spread is not None:
        changes["spread"] = spread
    if dedupe_window is not None:
        changes["dedupe_window"] = dedupe_window
    if not changes:
        raise UsageError(
            "nothing to change; use --journal, --retention, --retention-bytes, --ttl, --backlog-quota, "
            "--backlog-quota-bytes, --spread or --dedupe-window"
        )
    async with run.client() as client:
        changed = await client.change_topic(topic, **changes)
    said = []
    if journal is not None:
        kept = f"keeps {changed.journal:,} records in each partition" if changed.journal else "is off"
        said.append(f"the journal of topic {topic!r} {kept}")
    if retention is not None or retention_bytes is not None:
        said.append(f"topic {topic!r} {_retained(changed)}")
    if ttl is not None:
        lives = "never expire" if changed.ttl is None else f"expire after {changed.ttl:g} s"
        said.append(f"messages of topic {topic!r} that do not say when {lives}")
    if backlog_quota is not None:
        most = f"{changed.backlog_quota:,} messages" if changed.backlog_quota else "any number of messages"
        said.append(f"topic {topic!r} may have {most} unsettled")
    if backlog_quota_bytes is not None:
        most = f"{changed.backlog_quota_bytes:,} bytes" if changed.backlog_quota_bytes else "any size"
        said.append(f"the bodies of these in topic {topic!r} may have {most}")
    if spread is not None:
        where = "all workers" if spread == 1 else f"one of {spread} workers"
        said.append(f"the partitions of topic {topic!r} go to {where}")
    if dedupe_window is not None:
        said.append(f"topic {topic!r} knows uids for {changed.dedupe_window:g} s")
    run.say(changed, "; ".join(said))


def _retained(about: TopicInfo) -> str:
    """What a topic retains, for people."""
    limits = []
    if about.retention is not None:
        limits.append("forever" if about.retention == "forever" else f"for {about.retention:g} s")
    if about.retention_bytes is not None:
        limits.append(f"up to {about.retention_bytes:,} bytes")
    return f"retains settled messages {', '.join(limits)}" if limits else "retains nothing"


def _retention(text: str) -> Retention:
    """How long messages stay, as it is typed."""
    if text == "forever":
        return "forever"
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--retention {text!r} is neither a number of seconds nor forever") from None


def _records(text: str) -> bool | int:
    """How many records to keep, as it is typed."""
    if text in ("on", "off"):
        return text == "on"
    if text.isdecimal():
        return int(text)
    raise UsageError(f"--journal {text!r} is not on, off or a number of records")


@command(topics, "delete")
async def delete(run: BrokerRun, topic: TopicArgument, yes: YesOption = False) -> None:
    """Delete a topic with its subscriptions and messages; at a terminal it asks first."""
    async with run.client() as client:
        if not yes and can_ask(run):
            about = await client.describe_topic(topic)
            lost = count_of(about.messages + about.delayed, "message")
            whose = count_of(len(about.subscriptions), "subscription")
            await confirm(run, f"Delete topic {topic!r} with {whose} and {lost}?")
        await client.delete_topic(topic)
    run.say({"name": topic, "deleted": True}, f"topic {topic!r} is deleted")
