"""`keylane subscribe`: print messages as they come."""

import base64
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from broker.commandline.arguments import (
    ModeOption,
    PartitionOption,
    SubscriptionArgument,
    TopicArgument,
    position_of,
)
from broker.commandline.serve import cancel_on_signal
from broker.commandline.session import Session, command

if TYPE_CHECKING:
    from rich.text import Text

    from client import AsyncClient, Consumer, Message, SubscriptionInfo
    from client.types import Mode

__all__ = ["add_subscribe"]

PERMITS = 1_000


def add_subscribe(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "subscribe")(subscribe)


async def subscribe(
    session: Session,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    mode: ModeOption = None,
    partition: PartitionOption = None,
    offset: Annotated[
        str | None,
        typer.Option(
            help="Where a new one starts: earliest, latest, an id or a time (UTC unless it says).",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--max", help="Leave after so many.", min=1, show_default=False)
    ] = None,
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Give everything back when leaving.")] = False,
) -> None:
    """Print messages as they come, and ack them; Ctrl-C leaves.

    The subscription is made if it is not there.
    """
    async with session.client() as client:
        existing = await _find(client, topic, subscription)
        if existing and offset is not None:
            session.note(
                f"note: subscription {subscription!r} exists and goes on where it was; to move it: "
                f"keylane subscription seek {topic} {subscription} {offset}"
            )
        opened = client.subscribe(
            topic,
            subscription,
            mode=cast("Mode", mode or (existing.mode if existing else "shared")),
            start=position_of(offset or "latest"),
            partitions=None if partition is None else [partition],
            permits=min(limit or PERMITS, PERMITS),
        )
        async with opened as consumer:
            await _print_until_signal(session, consumer, limit, no_ack)


async def _find(client: "AsyncClient", topic: str, subscription: str) -> "SubscriptionInfo | None":
    from client.errors import SubscriptionNotFound

    try:
        return await client.describe_subscription(topic, subscription)
    except SubscriptionNotFound:
        return None


async def _print_until_signal(
    session: Session, consumer: "Consumer", limit: int | None, no_ack: bool
) -> None:
    """Print messages; a signal interrupts the waiting, and the consumer then leaves in good order."""
    import anyio

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        left = limit
        while left is None or left:
            message = await consumer.receive()
            await _print(session, message)
            if not no_ack:
                await _ack(session, message)
            if left is not None:
                left -= 1
        tasks.cancel_scope.cancel()


async def _ack(session: Session, message: "Message") -> None:
    from client.errors import StaleReceipt

    try:
        await message.ack()
    except StaleReceipt as error:
        session.note(f"warning: {error}; it will come again")


async def _print(session: Session, message: "Message") -> None:
    from client.errors import PayloadMissing

    try:
        data = await message.data()
    except PayloadMissing as error:
        session.note(f"warning: {error}")
        data = None
    if session.json:
        session.document(_document(message, data))
    else:
        session.out.print(_line(message, data), soft_wrap=True)


def _document(message: "Message", data: bytes | None) -> dict[str, Any]:
    return {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "key": message.key,
        **body_fields(data),
        "attributes": dict(message.attributes),
        "retry_count": message.retry_count,
        "age": round(message.age, 3),
        "produced_at": message.produced_at.isoformat(),
        "published_at": message.published_at.isoformat(),
        "deadline": message.deadline.isoformat(),
        "uid": message.uid,
        "producer_group": message.producer_group,
        "token": message.token,
    }


def body_fields(data: bytes | None) -> dict[str, str | None]:
    """A body as text, or in Base64 where it is none."""
    if data is None:
        return {"data": None}
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def _line(message: "Message", data: bytes | None) -> "Text":
    from rich.text import Text

    line = Text.assemble((message.id, "dim"), "  ", (message.key or "-", "cyan"), "  ")
    line.append("(its body is gone)" if data is None else data.decode(errors="backslashreplace"))
    for name, value in message.attributes.items():
        line.append(f"  {name}={value}", "dim")
    if message.retry_count:
        line.append(f"  retry {message.retry_count}", "yellow")
    return line
