"""`keylane topic`: make, list, describe, change and delete topics."""

from typing import Annotated

import typer

from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import Session, Usage, command

__all__ = ["topics"]

JournalOption = Annotated[
    str | None,
    typer.Option(
        metavar="on|off|N",
        help="Keep records of what happens to messages: N in each partition.",
        show_default=False,
    ),
]

topics = typer.Typer(no_args_is_help=True, help="Make, list, describe, change and delete topics.")


@command(topics, "create")
async def create(
    session: Session,
    topic: TopicArgument,
    partitions: Annotated[
        int | None, typer.Option(help="How many; else the broker's default.", min=1, show_default=False)
    ] = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept one that is there already.")] = False,
    journal: JournalOption = None,
    dedupe_window: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="For how long a uid counts; else ten minutes.", min=0, show_default=False
        ),
    ] = None,
) -> None:
    """Make a topic."""
    records = _records(journal) if journal is not None else False
    async with session.client() as client:
        made = await client.create_topic(
            topic, partitions=partitions, dedupe_window=dedupe_window, exist_ok=exist_ok, journal=records
        )
    session.say(made, f"topic {topic!r} has {made.partitions} partitions")


@command(topics, "list")
async def list_topics(session: Session) -> None:
    """List the topics."""
    from keylane.errors import TopicNotFound

    found = []
    async with session.client() as client:
        for name in sorted(await client.topics()):
            try:
                found.append(await client.describe_topic(name))
            except TopicNotFound:
                continue  # gone since
    rows = [(about.name, about.partitions, about.messages, sorted(about.subscriptions)) for about in found]
    session.table(found, ["topic", "partitions", "messages", "subscriptions"], rows)


@command(topics, "describe")
async def describe(session: Session, topic: TopicArgument) -> None:
    """Show all there is to know of a topic."""
    async with session.client() as client:
        session.properties(await client.describe_topic(topic))


@command(topics, "change")
async def change(session: Session, topic: TopicArgument, journal: JournalOption = None) -> None:
    """Switch the journal of a topic on, which begins it anew, or off, which leaves what is there."""
    if journal is None:
        raise Usage("nothing to change: use --journal on, --journal off or --journal N")
    async with session.client() as client:
        changed = await client.change_topic(topic, journal=_records(journal))
    kept = f"keeps {changed.journal:,} records in each partition" if changed.journal else "is off"
    session.say(changed, f"the journal of topic {topic!r} {kept}")


def _records(text: str) -> bool | int:
    """How many records to keep, as it is typed."""
    if text in ("on", "off"):
        return text == "on"
    if text.isdecimal():
        return int(text)
    raise Usage(f"--journal {text!r}: use on, off or how many records to keep")


@command(topics, "delete")
async def delete(session: Session, topic: TopicArgument) -> None:
    """Delete a topic with its subscriptions and messages."""
    async with session.client() as client:
        await client.delete_topic(topic)
    session.say({"name": topic, "deleted": True}, f"topic {topic!r} is deleted")
