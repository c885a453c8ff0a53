"""`keylane subscribe`: print messages as they arrive."""

import base64
import sys
from collections.abc import Iterator
from select import PIPE_BUF
from typing import Annotated, Any, cast

import typer

import keylane
from keylane import SubscriptionInfo
from keylane.commandline.output import UsageError, encoded
from keylane.errors import PayloadMissing, SubscriptionNotFound
from keylane.types import Mode
from keylane_broker.commandline.arguments import (
    FilterOption,
    KeysOption,
    PartitionOption,
    SubscriptionArgument,
    TopicArgument,
    parse_filter,
    parse_position,
)
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.signals import cancel_on_signal

__all__ = ["add_subscribe"]

PERMITS = 1_000
MOST = 10_000  # permits that a consumer can have
BATCH = 500  # messages that are printed together, so that others are on their way meanwhile


def add_subscribe(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "subscribe")(subscribe)


async def subscribe(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    mode: Annotated[
        Mode | None,
        typer.Option(
            metavar="MODE",
            help="shared, key_shared, exclusive, failover or multicast.",
            show_default=False,
        ),
    ] = None,
    partition: PartitionOption = None,
    offset: Annotated[
        str | None,
        typer.Option(
            help="Start of a new subscription: earliest, latest, an id or a time (UTC by default).",
            show_default=False,
        ),
    ] = None,
    keys: KeysOption = None,
    filter: FilterOption = None,
    limit: Annotated[
        int | None, typer.Option("--max", help="Stop after N messages.", min=1, show_default=False)
    ] = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Return messages at the end instead of acking them.")
    ] = False,
) -> None:
    """Subscribe to a topic: print messages as they arrive, and ack them, until Ctrl-C.

    The subscription is created if it does not exist.
    """
    if no_ack and limit and limit > MOST:
        raise UsageError(f"--no-ack can keep at most {MOST:,} messages: omit it, or lower --max")
    async with run.client() as client:
        existing = await _find(client, topic, subscription)
        if existing and offset is not None:
            run.note(
                f"note: subscription {subscription!r} exists and continues where it was; to move it: "
                f"keylane subscription seek {topic} {subscription} {offset}"
            )
        most = MOST if no_ack else PERMITS
        opened = client.subscribe(
            topic,
            subscription,
            mode=cast(Mode, mode or (existing.mode if existing else "shared")),
            start=parse_position(offset or "latest"),
            partitions=None if partition is None else [partition],
            keys=keys,
            filter=parse_filter(filter),
            permits=min(limit or most, most),
            on_stale=lambda message: run.note(
                f"warning: message {message.id}: its lease has ended, so it will be delivered again"
            ),
        )
        async with opened as consumer:
            await _print_until_signal(run, consumer, limit, no_ack)


async def _find(client: "keylane.AsyncClient", topic: str, subscription: str) -> SubscriptionInfo | None:
    try:
        return await client.describe_subscription(topic, subscription)
    except SubscriptionNotFound:
        return None


async def _print_until_signal(
    run: BrokerRun, consumer: "keylane.Consumer", limit: int | None, no_ack: bool
) -> None:
    """Print messages; a signal interrupts the waiting, and the consumer then leaves in good order.

    What was printed is acked in the background, at the latest when the consumer leaves; the rest goes back,
    and so does what has no body.
    """
    import anyio

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        left = limit
        while left is None or left:
            batch = await consumer.take(min(left or BATCH, BATCH))
            bodies = await _bodies(run, batch)
            gone = {message.id for message, body in zip(batch, bodies, strict=True) if body is None}
            for piece in _pieces(batch, _texts(run, batch, bodies)):
                run.write("".join(text for _, text in piece))
                for message, _ in [] if no_ack else piece:
                    if message.id not in gone:  # else it goes back at the end: the store may be another one
                        async with message:
                            pass
            if left is not None:
                left -= len(batch)
        tasks.cancel_scope.cancel()


async def _bodies(run: BrokerRun, batch: "keylane.Batch") -> list[bytes | None]:
    """The body of each, None where it is gone."""
    try:
        return list(await batch.data())
    except PayloadMissing:
        return [await _body(run, message) for message in batch]


async def _body(run: BrokerRun, message: "keylane.Message") -> bytes | None:
    try:
        return await message.data()
    except PayloadMissing as error:
        run.note(f"warning: {error}. Here it goes back; `keylane skip` drops it")
        return None


def _texts(run: BrokerRun, batch: "keylane.Batch", bodies: list[bytes | None]) -> list[str]:
    """A line for each message."""
    if run.json:
        return [encoded(document, sys.stdout) for document in map(_document, batch, bodies)]
    return run.lines(map(_line, batch, bodies))


def _pieces(batch: "keylane.Batch", texts: list[str]) -> Iterator[list[tuple["keylane.Message", str]]]:
    """Lines that a pipe takes together or not at all: whoever stops reading it gets no half of them."""
    piece: list[tuple[keylane.Message, str]] = []
    size = 0
    for message, text in zip(batch, texts, strict=True):
        length = len(text.encode())
        if piece and size + length > PIPE_BUF:
            yield piece
            piece, size = [], 0
        piece.append((message, text))
        size += length
    yield piece


def _document(message: "keylane.Message", data: bytes | None) -> dict[str, Any]:
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


def _line(message: "keylane.Message", data: bytes | None) -> list[tuple[str, str]]:
    """The parts of a line, each with its style."""
    body = "(body is gone)" if data is None else data.decode(errors="backslashreplace")
    parts = [(message.id, "dim"), ("  ", ""), (message.key or "-", "cyan"), ("  ", ""), (body, "")]
    parts += [(f"  {name}={value}", "dim") for name, value in message.attributes.items()]
    if message.retry_count:
        parts.append((f"  retry {message.retry_count}", "yellow"))
    return parts
