"""`keylane subscription`: create, change, list, describe, seek, pause, resume and delete subscriptions."""

from typing import Annotated, Any

import typer

from keylane.commandline.output import UsageError
from keylane.errors import SubscriptionNotFound
from keylane.types import Delivery, Mode, Poison
from keylane_broker.commandline.arguments import (
    BackoffOption,
    FilterOption,
    KeysOption,
    SubscriptionArgument,
    TopicArgument,
    parse_backoff,
    parse_filter,
    parse_position,
)
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.confirming import YesOption, can_ask, confirm

__all__ = ["subscriptions"]

subscriptions = typer.Typer(
    no_args_is_help=True, help="Create, change, list, describe, seek, pause, resume and delete subscriptions."
)


@command(subscriptions, "create")
async def create(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    mode: Annotated[
        Mode | None,
        typer.Option(
            metavar="MODE",
            help="shared, key_shared, exclusive, failover, multicast or cursor.",
            show_default="shared",
        ),
    ] = None,
    offset: Annotated[
        str, typer.Option("--offset", "--start", help="earliest, latest, an id or a time (UTC by default).")
    ] = "latest",
    lease: Annotated[float, typer.Option(help="Seconds a consumer has to settle a message.")] = 30.0,
    delivery: Annotated[
        Delivery, typer.Option(metavar="WORD", help="at_least_once or at_most_once.")
    ] = "at_least_once",
    max_retries: Annotated[
        int | None, typer.Option(help="Maximum redeliveries of a message; no limit by default.", min=0)
    ] = None,
    backoff: BackoffOption = None,
    dead_letter: Annotated[
        str | None, typer.Option(help="Topic for what failed too often.", show_default="TOPIC.dead")
    ] = None,
    poison: Annotated[
        Poison, typer.Option(metavar="WORD", help="skip what failed too often, or park its lane.")
    ] = "skip",
    keys: KeysOption = None,
    filter: FilterOption = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept a subscription that exists.")] = False,
) -> None:
    """Create a subscription."""
    options: dict[str, Any] = {
        "mode": mode or "shared",
        "delivery": delivery,
        "max_retries": max_retries,
        "dead_letter": dead_letter,
        "poison": poison,
        "keys": keys,
        "filter": parse_filter(filter),
    }
    if backoff is not None:
        options["backoff"] = parse_backoff(backoff)
    async with run.client() as client:
        await client.create_subscription(
            topic, subscription, start=parse_position(offset), lease=lease, exist_ok=exist_ok, **options
        )
        made = await client.describe_subscription(topic, subscription)
    run.say(made, f"subscription {subscription!r} on {topic!r} is {made.mode}")


@command(subscriptions, "change")
async def change(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    lease: Annotated[
        float | None, typer.Option(help="Seconds a consumer has to settle a message.", show_default=False)
    ] = None,
    max_retries: Annotated[
        int | None,
        typer.Option(help="Maximum redeliveries of a message; -1 is no limit.", min=-1, show_default=False),
    ] = None,
    backoff: BackoffOption = None,
    dead_letter: Annotated[
        str | None, typer.Option(help="Topic for what failed too often.", show_default=False)
    ] = None,
    poison: Annotated[
        Poison | None, typer.Option(metavar="WORD", help="skip or park.", show_default=False)
    ] = None,
) -> None:
    """Change settings of a subscription; what is not named stays as it is."""
    changes: dict[str, Any] = {"lease": lease, "dead_letter": dead_letter, "poison": poison}
    changes = {name: value for name, value in changes.items() if value is not None}
    if max_retries is not None:
        changes["max_retries"] = None if max_retries < 0 else max_retries
    if backoff is not None:
        changes["backoff"] = parse_backoff(backoff)
    if not changes:
        raise UsageError("nothing to change: name a setting, such as --max-retries 5")
    async with run.client() as client:
        await client.change_subscription(topic, subscription, **changes)
        changed = await client.describe_subscription(topic, subscription)
    run.say(changed, f"subscription {subscription!r} on {topic!r} is changed: {', '.join(sorted(changes))}")


@command(subscriptions, "list")
async def list_subscriptions(run: BrokerRun, topic: TopicArgument) -> None:
    """List the subscriptions of a topic."""
    found = []
    async with run.client() as client:
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
    run.table(found, columns, rows)


@command(subscriptions, "describe")
async def describe(run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Describe a subscription: its settings, backlog and consumers."""
    async with run.client() as client:
        run.properties(await client.describe_subscription(topic, subscription))


@command(subscriptions, "seek")
async def seek(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    position: Annotated[
        str,
        typer.Argument(
            metavar="POSITION",
            help="earliest, latest, an id (moves its partition only) or a time (UTC by default).",
            show_default=False,
        ),
    ],
) -> None:
    """Seek: move a subscription to another position, such as earliest or 2026-12-31T23:59+01:00."""
    async with run.client() as client:
        await client.seek(topic, subscription, parse_position(position))
    moved = {"topic": topic, "name": subscription, "position": position}
    run.say(moved, f"subscription {subscription!r} on {topic!r} continues from {position}")


@command(subscriptions, "pause")
async def pause(run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Pause a subscription: deliver nothing until it is resumed; leases stay."""
    async with run.client() as client:
        await client.pause_subscription(topic, subscription)
    paused = {"topic": topic, "name": subscription, "paused": True}
    run.say(paused, f"subscription {subscription!r} on {topic!r} is paused")


@command(subscriptions, "resume")
async def resume(run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """Resume a paused subscription."""
    async with run.client() as client:
        await client.resume_subscription(topic, subscription)
    resumed = {"topic": topic, "name": subscription, "paused": False}
    run.say(resumed, f"subscription {subscription!r} on {topic!r} is resumed")


@command(subscriptions, "delete")
async def delete(
    run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument, yes: YesOption = False
) -> None:
    """Delete a subscription and its backlog; at a terminal it asks first."""
    async with run.client() as client:
        if not yes and can_ask(run):
            about = await client.describe_subscription(topic, subscription)
            await confirm(
                run, f"Delete subscription {subscription!r} of {topic!r}, which is owed {about.backlog:,}?"
            )
        await client.delete_subscription(topic, subscription)
    deleted = {"topic": topic, "name": subscription, "deleted": True}
    run.say(deleted, f"subscription {subscription!r} on {topic!r} is deleted")
