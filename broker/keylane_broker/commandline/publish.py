"""`keylane publish`: one message, or many of the same to try things out."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane_broker.commandline.arguments import TopicArgument, time_of
from keylane_broker.commandline.command import Session, Usage, command

if TYPE_CHECKING:
    from keylane import AsyncClient, OutgoingMessage, Published

__all__ = ["add_publish"]

BATCH = 1_000


def add_publish(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "publish")(publish)


async def publish(
    session: Session,
    topic: TopicArgument,
    body: Annotated[
        str, typer.Argument(metavar="BODY", help="The body; - reads it from stdin.", show_default=False)
    ],
    key: Annotated[str | None, typer.Option(help="Chooses the lane and the partition.")] = None,
    partition: Annotated[int | None, typer.Option(help="Instead of the key's.", min=0)] = None,
    attr: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Attribute; repeat.")] = None,
    durability: Annotated[str | None, typer.Option(help="memory, fsync, replicated or replicated:N.")] = None,
    uid: Annotated[str | None, typer.Option(help="Publishing it again changes nothing.")] = None,
    count: Annotated[int, typer.Option(help="Publish so many.", min=1)] = 1,
    delay: Annotated[float | None, typer.Option(help="Seconds until it is published.", min=0)] = None,
    deliver_at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it is published, like 2026-12-31T23:59; UTC unless it says."),
    ] = None,
) -> None:
    """Publish a message."""
    from keylane import OutgoingMessage

    if uid is not None and count > 1:
        raise Usage("--uid names one message; leave out --count")
    data = sys.stdin.buffer.read() if body == "-" else body.encode()
    message = OutgoingMessage(
        data,
        key=key,
        partition=partition,
        attributes=_attributes(attr or []),
        uid=uid,
        durability=durability,
        delay=delay,
        deliver_at=time_of(deliver_at) if deliver_at is not None else None,
    )
    async with session.client() as client:
        if count > 1:
            await _publish_many(session, client, topic, message, count)
        else:
            [published] = await client.publish_many(topic, [message])
            session.say(_document(published), _sentence(topic, published))


def _attributes(words: Sequence[str]) -> dict[str, str]:
    attributes = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not (name and separator):
            raise Usage(f"--attr {word!r} is not of the form name=value")
        attributes[name] = value
    return attributes


def _document(published: "Published") -> dict[str, Any]:
    return {
        "id": published.id,
        "partition": published.partition,
        "uid": published.uid,
        "duplicate": published.duplicate,
        "no_subscribers": published.no_subscribers,
        "delayed": published.delayed,
        "durability": published.durability,
    }


def _sentence(topic: str, published: "Published") -> str:
    if published.no_subscribers:
        return f"{topic!r} has no subscription, so nothing was stored (uid {published.uid})"
    if published.delayed:
        return f"kept until it is due (uid {published.uid}, {published.durability})"
    if published.duplicate and published.id is None:
        return f"uid {published.uid} is there already, and not due yet"
    already = ", which was there already" if published.duplicate else ""
    return f"published {published.id}{already} (uid {published.uid}, {published.durability})"


async def _publish_many(
    session: Session, client: "AsyncClient", topic: str, message: "OutgoingMessage", count: int
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from keylane.errors import DurabilityNotReached, PublishFailed

    first = last = None
    unowed = 0
    console = Console(stderr=True)
    began = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"publishing to {topic}", total=count)
        for start in range(0, count, BATCH):
            size = min(BATCH, count - start)
            try:
                answers = await client.publish_many(topic, [message] * size)
            except (DurabilityNotReached, PublishFailed) as error:
                where = f"of {count}, {start} before these {size} were published, and "
                where += f"{count - start - size} behind them were not sent"
                if isinstance(error, PublishFailed):
                    raise PublishFailed(f"{error} ({where})", error.published) from error
                raise DurabilityNotReached(f"{error} ({where})", stored=error.stored) from error
            first = first or answers[0].id
            last = answers[-1].id
            unowed += sum(answer.no_subscribers for answer in answers)
            progress.update(task, advance=len(answers))
    seconds = time.perf_counter() - began
    document = {
        "published": count,
        "no_subscribers": unowed,
        "first_id": first,
        "last_id": last,
        "seconds": round(seconds, 3),
        "per_second": round(count / seconds),
    }
    nobody = f"; {topic!r} has no subscription, so nothing was stored" if unowed else ""
    session.say(
        document, f"published {count:,} messages in {seconds:.2f} s, {count / seconds:,.0f}/s{nobody}"
    )
