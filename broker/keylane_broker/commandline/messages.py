"""`keylane skip`, `delete-message`, `purge` and `explain`: what becomes of messages."""

import sys
from typing import Annotated

import typer

import keylane
from keylane.commandline.output import UsageError
from keylane_broker.commandline.arguments import SubscriptionArgument, TopicArgument
from keylane_broker.commandline.command import PATIENCE, BrokerRun, command
from keylane_broker.commandline.confirming import YesOption, can_ask, confirm

__all__ = ["add_message_commands"]

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Message id, such as 3:1794803456029-42.", show_default=False)
]


def add_message_commands(app: typer.Typer) -> None:
    """Make them commands."""
    command(app, "skip")(skip)
    command(app, "delete-message")(delete_message)
    command(app, "purge")(purge)
    command(app, "explain")(explain)


async def skip(
    run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument, id: IdArgument
) -> None:
    """Skip a message: settle it for one subscription, whether or not a consumer has it.

    A consumer that has it may go on with it, but cannot settle it any more.
    """
    async with run.client() as client:
        await client.skip(topic, subscription, id)
    skipped = {"topic": topic, "subscription": subscription, "id": id, "skipped": True}
    run.say(skipped, f"message {id} is settled for subscription {subscription!r} of {topic!r}")


async def delete_message(
    run: BrokerRun,
    topic: TopicArgument,
    message: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Message id, or the uid of one that is delayed or whose uid its producer chose.",
            show_default=False,
        ),
    ],
    partition: Annotated[
        int | None, typer.Option(help="Where to look for a uid.", min=0, show_default="all partitions")
    ] = None,
    producer_group: Annotated[
        str | None, typer.Option(help="Producer group that the message is of.", show_default=False)
    ] = None,
    yes: YesOption = False,
) -> None:
    """Delete a message for all subscriptions, unless a consumer has it; at a terminal it asks first."""
    if not yes and can_ask(run):
        await confirm(run, f"Delete message {message} of {topic!r} for all subscriptions?")
    async with keylane.AsyncClient(run.server, timeout=PATIENCE, producer_group=producer_group) as client:
        await client.delete_message(topic, message, partition=partition)
    run.say({"topic": topic, "id": message, "deleted": True}, f"message {message} of {topic!r} is deleted")


async def explain(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Message id, or uid as for delete-message.", show_default=False),
    ],
) -> None:
    """Explain where a message is for a subscription, and what it waits for."""
    async with run.client() as client:
        found = await client.explain(topic, subscription, id)
    run.say(found, f"{found.state.replace('_', ' ')}: {found.reason}")


async def purge(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: Annotated[
        str | None,
        typer.Argument(metavar="SUBSCRIPTION", help="Only what this one is owed.", show_default=False),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Purge a subscription, or with all its subscriptions a topic: everything published so far is gone.

    That includes messages that consumers have, and of a topic the delayed ones. An interrupted purge is
    finished by the next one.
    """
    whose = f"subscription {subscription!r} of {topic!r}" if subscription else f"topic {topic!r}"
    async with run.client() as client:
        if subscription:
            count = (await client.describe_subscription(topic, subscription)).backlog
        else:
            about = await client.describe_topic(topic)
            count = about.messages + about.delayed
        if not yes:
            if not can_ask(run):
                raise UsageError("purge deletes messages: confirm with --yes")
            await confirm(run, f"Purge {count:,} messages of {whose}?")
        shown = sys.stderr.isatty() and not run.json
        purged = await client.purge(
            topic,
            subscription,
            on_progress=(lambda gone: run.note(f"{gone:,} of {count:,} messages are gone"))
            if shown
            else None,
        )
    done = {"topic": topic, "subscription": subscription, "messages": purged}
    run.say(done, f"purged {purged:,} messages of {whose}")
