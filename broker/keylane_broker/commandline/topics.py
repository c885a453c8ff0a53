"""`keylane topic`: create, list, describe, change and delete topics."""

from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.errors import TopicNotFound
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import BrokerRun, command

__all__ = ["topics"]

JournalOption = Annotated[
    str | None,
    typer.Option(
        metavar="on|off|N",
        help="Record what happens to each message, keeping N records per partition.",
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
) -> None:
    """Create a topic."""
    records = _records(journal) if journal is not None else False
    async with run.client() as client:
        made = await client.create_topic(
            topic, partitions=partitions, dedupe_window=dedupe_window, exist_ok=exist_ok, journal=records
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
    """Describe a topic: its settings, messages and subscriptions."""
    async with run.client() as client:
        run.properties(await client.describe_topic(topic))


@command(topics, "change")
async def change(run: BrokerRun, topic: TopicArgument, journal: JournalOption = None) -> None:
    """Change a topic: switch its journal on, which starts it anew, or off, which keeps its records."""
    if journal is None:
        raise UsageError("nothing to change; use --journal on, --journal off or --journal N")
    async with run.client() as client:
        changed = await client.change_topic(topic, journal=_records(journal))
    kept = f"keeps {changed.journal:,} records in each partition" if changed.journal else "is off"
    run.say(changed, f"the journal of topic {topic!r} {kept}")


def _records(text: str) -> bool | int:
    """How many records to keep, as it is typed."""
    if text in ("on", "off"):
        return text == "on"
    if text.isdecimal():
        return int(text)
    raise UsageError(f"--journal {text!r} is not on, off or a number of records")


@command(topics, "delete")
async def delete(run: BrokerRun, topic: TopicArgument) -> None:
    """Delete a topic with its subscriptions and messages."""
    async with run.client() as client:
        await client.delete_topic(topic)
    run.say({"name": topic, "deleted": True}, f"topic {topic!r} is deleted")
