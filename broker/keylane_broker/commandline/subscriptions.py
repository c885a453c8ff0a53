"""`keylane subscription`: make, list, describe, move, pause, resume and delete subscriptions."""

from typing import Annotated, Any

import typer

from keylane_broker.commandline.arguments import ModeOption, SubscriptionArgument, TopicArgument, position_of
from keylane_broker.commandline.command import Session, command

__all__ = ["subscriptions"]

subscriptions = typer.Typer(
    no_args_is_help=True, help="Make, list, describe, move, pause and delete subscriptions."
)


@command(subscriptions, "create")
async def create(
    session: Session,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    mode: ModeOption = None,
    start: Annotated[
        str, typer.Option(help="earliest, latest, an id or a time (UTC unless it says).")
    ] = "latest",
    lease: Annotated[float, typer.Option(help="Seconds to settle a message in.")] = 30.0,
    delivery: Annotated[str, typer.Option(help="at_least_once or at_most_once.")] = "at_least_once",
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept one that is there already.")] = False,
) -> None:
    """Make a subscription."""
    options: dict[str, Any] = {"mode": mode or "shared", "delivery": delivery}
    async with session.client() as client:
        await client.create_subscription(
            topic, subscription, start=position_of(start), lease=lease, exist_ok=exist_ok, **options
        )
        made = await client.describe_subscription(topic, subscription)
    session.say(made, f"subscription {subscription!r} on {topic!r} is {made.mode}")


@command(subscriptions, "list")
async def list_subscriptions(session: Session, topic: TopicArgument) -> None:
    """List the subscriptions of a topic."""
    from keylane.errors import SubscriptionNotFound

    found = []
    async with session.client() as client:
        for name in sorted((await client.describe_topic(topic)).subscriptions):
            try:
                found.append(await client.describe_subscription(topic, name))
            except SubscriptionNotFound:
                continue  # gone since
    rows = [
        (item.name, item.mode, item.backlog, item.leased, item.waiting, len(item.consumers), item.paused)
        for item in found
    ]
    columns = ["subscription", "mode", "backlog", "leased", "waiting", "consumers", "paused"]
    session.table(found, columns, rows)


@command(subscriptions, "describe")
async def describe(session: Session, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Show all there is to know of a subscription."""
    async with session.client() as client:
        session.properties(await client.describe_subscription(topic, subscription))


@command(subscriptions, "seek")
async def seek(
    session: Session,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    position: Annotated[
        str,
        typer.Argument(
            help="earliest, latest, an id (its partition only) or a time (UTC unless it says).",
            show_default=False,
        ),
    ],
) -> None:
    """Move a subscription to another place; a time is like 2026-12-31T23:59, UTC unless it says +01:00."""
    async with session.client() as client:
        await client.seek(topic, subscription, position_of(position))
    moved = {"topic": topic, "name": subscription, "position": position}
    session.say(moved, f"subscription {subscription!r} on {topic!r} goes on from {position}")


@command(subscriptions, "pause")
async def pause(session: Session, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Deliver nothing until it is resumed; what is leased stays leased."""
    async with session.client() as client:
        await client.pause_subscription(topic, subscription)
    paused = {"topic": topic, "name": subscription, "paused": True}
    session.say(paused, f"subscription {subscription!r} on {topic!r} is paused")


@command(subscriptions, "resume")
async def resume(session: Session, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Deliver again."""
    async with session.client() as client:
        await client.resume_subscription(topic, subscription)
    resumed = {"topic": topic, "name": subscription, "paused": False}
    session.say(resumed, f"subscription {subscription!r} on {topic!r} delivers again")


@command(subscriptions, "delete")
async def delete(session: Session, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Delete a subscription and what it has not settled."""
    async with session.client() as client:
        await client.delete_subscription(topic, subscription)
    deleted = {"topic": topic, "name": subscription, "deleted": True}
    session.say(deleted, f"subscription {subscription!r} on {topic!r} is deleted")
