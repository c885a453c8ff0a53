"""`keylane peek`: show what a subscription has not settled, without leasing it."""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from keylane import PeekedMessage
from keylane_broker.commandline.arguments import PartitionOption, SubscriptionArgument, TopicArgument
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.subscribe import body_fields

__all__ = ["add_peek"]

SHOWN = 60  # characters of a body in the table


def add_peek(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "peek")(peek)


async def peek(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    partition: PartitionOption = None,
    limit: Annotated[int, typer.Option("--max", help="Maximum to show.", min=1)] = 10,
    bodies: Annotated[bool, typer.Option("--bodies/--no-bodies", help="Show bodies.")] = True,
) -> None:
    """Peek at what a subscription has not settled yet, without leasing it."""
    async with run.client() as client:
        found = await client.peek(topic, subscription, partition=partition, limit=limit, bodies=bodies)
    columns = ["id", "key", "state", "retries", "bytes", "age", *(["body"] if bodies else [])]
    rows = [
        (
            *(item.id, item.key, _state(item), item.retry_count, item.size, _age(item)),
            *([_shown(item.data)] if bodies else []),
        )
        for item in found
    ]
    run.table([_told(item, bodies) for item in found], columns, rows)


def _told(message: PeekedMessage, bodies: bool) -> dict[str, Any]:
    """As JSON: without the body, or with it as `keylane subscribe` has it."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    del fields["data"]
    return {**fields, **body_fields(message.data)} if bodies else fields


def _shown(data: bytes | None) -> str:
    """The beginning of a body."""
    if data is None:
        return "(body is gone)"
    text = data[: SHOWN + 1].decode(errors="backslashreplace")
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _state(message: PeekedMessage) -> str:
    return f"{message.state} to {message.consumer}" if message.consumer else message.state


def _age(message: PeekedMessage) -> str:
    seconds = max(0, int((datetime.now(UTC) - message.produced_at).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
