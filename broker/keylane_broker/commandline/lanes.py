"""`keylane lanes`: list parked lanes and let them go on; move a free key to a consumer."""

from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.types import UnparkAction
from keylane_broker.commandline.arguments import SubscriptionArgument, TopicArgument
from keylane_broker.commandline.command import BrokerRun, command

__all__ = ["lanes"]

lanes = typer.Typer(
    no_args_is_help=True,
    help="Lanes: list those that are parked, let them go on, move a free key to a consumer.",
)

KeyArgument = Annotated[
    str | None, typer.Argument(metavar="KEY", help="The key of the lane.", show_default=False)
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="The same, if it begins with a dash.", show_default=False)
]
IdOption = Annotated[
    str | None,
    typer.Option("--id", help="The message that it is parked at; needed without a key.", show_default=False),
]


@command(lanes, "list")
async def list_lanes(run: BrokerRun, topic: TopicArgument, subscription: SubscriptionArgument) -> None:
    """List the lanes of a subscription that have stopped at a message without retries left."""
    async with run.client() as client:
        found = await client.parked(topic, subscription)
    rows = [(one.key, one.id, one.retries, one.waiting, one.since, one.reason[:80]) for one in found]
    run.table(found, ["key", "id", "retries", "waiting", "since", "reason"], rows)


@command(lanes, "resume")
async def resume(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    key: KeyArgument = None,
    named: KeyOption = None,
    id: IdOption = None,
) -> None:
    """Resume a lane: the message that it has stopped at gets all its retries again."""
    await _unpark(run, topic, subscription, _one(key, named), id, "resume")


@command(lanes, "skip")
async def skip(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    key: KeyArgument = None,
    named: KeyOption = None,
    id: IdOption = None,
) -> None:
    """Skip the message that a lane has stopped at: it goes to the dead letters, and the lane goes on."""
    await _unpark(run, topic, subscription, _one(key, named), id, "skip")


@command(lanes, "redrive")
async def redrive(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    key: KeyArgument = None,
    named: KeyOption = None,
    id: IdOption = None,
) -> None:
    """Redrive a lane: resume it, and send the dead letters of its key back behind what waits."""
    await _unpark(run, topic, subscription, _one(key, named), id, "redrive")


@command(lanes, "move")
async def move(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    key: Annotated[str, typer.Option(help="The key; no consumer may have messages of it.")],
    consumer: Annotated[str, typer.Option(help="The consumer to get it next.")],
    partition: Annotated[
        int | None, typer.Option(help="Its partition.", min=0, show_default="that of the key")
    ] = None,
) -> None:
    """Move a free key to a consumer: that is the next one to get it (key_shared)."""
    async with run.client() as client:
        waiting = await client.move_key(topic, subscription, key, consumer, partition=partition)
    moved = {"topic": topic, "name": subscription, "key": key, "consumer": consumer, "waiting": waiting}
    run.say(moved, f"key {key!r} goes to consumer {consumer!r} next ({waiting} messages wait)")


def _one(key: str | None, named: str | None) -> str | None:
    """Return the key, which may be said in two ways."""
    if key is not None and named is not None:
        raise UsageError("a lane has one key: name it, or use --key")
    return named if key is None else key


async def _unpark(
    run: BrokerRun, topic: str, subscription: str, key: str | None, id: str | None, action: UnparkAction
) -> None:
    if key is None and id is None:
        raise UsageError("which lane? name its key, or the --id of the message that it is parked at")
    async with run.client() as client:
        await client.unpark(topic, subscription, key, action=action, id=id)
    done = {"topic": topic, "name": subscription, "key": key, "id": id, "action": action}
    lane = f"the lane of {key!r}" if key else f"the lane at {id}"
    run.say(done, f"{lane} in {subscription!r} on {topic!r} goes on ({action})")
