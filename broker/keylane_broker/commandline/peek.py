"""`keylane peek`: show what a subscription has not settled, without leasing it."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from keylane import PeekedMessage
from keylane_broker.commandline.arguments import PartitionOption, SubscriptionArgument, TopicArgument
from keylane_broker.commandline.command import BrokerRun, command

__all__ = ["add_peek"]


def add_peek(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "peek")(peek)


async def peek(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    partition: PartitionOption = None,
    limit: Annotated[int, typer.Option("--max", help="Maximum to show.", min=1)] = 10,
) -> None:
    """Peek at what a subscription has not settled yet, without leasing it."""
    async with run.client() as client:
        found = await client.peek(topic, subscription, partition=partition, limit=limit)
    rows = [(item.id, item.key, _state(item), item.retry_count, item.size, _age(item)) for item in found]
    run.table(found, ["id", "key", "state", "retries", "bytes", "age"], rows)


def _state(message: PeekedMessage) -> str:
    return f"{message.state} to {message.consumer}" if message.consumer else message.state


def _age(message: PeekedMessage) -> str:
    seconds = max(0, int((datetime.now(UTC) - message.produced_at).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
