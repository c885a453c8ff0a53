"""`keylane publish`: publish a message, or many copies of it."""

import time
from typing import Annotated, Any

import typer

import keylane
from keylane import OutgoingMessage, Published
from keylane.commandline.output import UsageError, progress_bar
from keylane.commandline.typed import parse_pair, parse_time
from keylane.errors import DurabilityNotReached, PublishFailed
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.stdin import read_all

__all__ = ["add_publish"]

BATCH = 1_000


def add_publish(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "publish")(publish)


async def publish(
    run: BrokerRun,
    topic: TopicArgument,
    body: Annotated[
        str, typer.Argument(metavar="BODY", help="Message body; - reads stdin.", show_default=False)
    ],
    key: Annotated[
        str | None, typer.Option(help="Message key; messages with the same key stay in order.")
    ] = None,
    partition: Annotated[int | None, typer.Option(help="Partition, overriding the key.", min=0)] = None,
    attr: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Message attribute; may be repeated.")
    ] = None,
    durability: Annotated[str | None, typer.Option(help="memory, fsync, replicated or replicated:N.")] = None,
    uid: Annotated[str | None, typer.Option(help="Unique id; publishing it again has no effect.")] = None,
    count: Annotated[int, typer.Option(help="Number of copies.", min=1)] = 1,
    delay: Annotated[
        float | None, typer.Option(help="Seconds to wait before it is published.", min=0)
    ] = None,
    deliver_at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time to publish at, such as 2026-12-31T23:59 (UTC by default)."),
    ] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds after which it expires.", min=0)] = None,
    expires_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time at which it expires (UTC by default).")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            help="0 to 9; larger goes first in modes shared and multicast.", min=0, max=9, show_default="0"
        ),
    ] = None,
) -> None:
    """Publish a message."""
    if uid is not None and count > 1:
        raise UsageError("--uid is the id of one message; omit --count")
    data = await read_all() if body == "-" else body.encode()
    message = OutgoingMessage(
        data,
        key=key,
        partition=partition,
        attributes=_attributes(attr or []),
        uid=uid,
        durability=durability,
        delay=delay,
        ttl=ttl,
        priority=priority,
        expires_at=parse_time(expires_at) if expires_at is not None else None,
        deliver_at=parse_time(deliver_at) if deliver_at is not None else None,
    )
    async with run.client() as client:
        if count > 1:
            await _publish_many(run, client, topic, message, count)
        else:
            [published] = await client.publish_many(topic, [message])
            run.say(_document(published), _sentence(topic, published))


def _document(published: Published) -> dict[str, Any]:
    return {
        "id": published.id,
        "partition": published.partition,
        "uid": published.uid,
        "duplicate": published.duplicate,
        "no_subscribers": published.no_subscribers,
        "delayed": published.delayed,
        "durability": published.durability,
    }


def _sentence(topic: str, published: Published) -> str:
    if published.no_subscribers:
        return f"{_unwanted(topic)} (uid {published.uid})"
    if published.delayed:
        return f"stored until it is due (uid {published.uid}, {published.durability})"
    if published.duplicate and published.id is None:
        return f"uid {published.uid} was published already, and is not due yet"
    already = ", which was published already" if published.duplicate else ""
    return f"published {published.id}{already} (uid {published.uid}, {published.durability})"


def _unwanted(topic: str) -> str:
    return f"{topic!r} has no subscription that wants it, so nothing was stored"


def _attributes(words: list[str]) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for name, value in (parse_pair(word, "--attr") for word in words):
        if name in attributes:
            raise UsageError(f"--attr {name!r} is given twice; an attribute has one value")
        attributes[name] = value
    return attributes


async def _publish_many(
    run: BrokerRun, client: "keylane.AsyncClient", topic: str, message: OutgoingMessage, count: int
) -> None:
    first = last = None
    no_subscribers = 0
    began = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task(f"publishing to {topic}", total=count)
        for start in range(0, count, BATCH):
            size = min(BATCH, count - start)
            try:
                answers = await client.publish_many(topic, [message] * size)
            except (DurabilityNotReached, PublishFailed) as error:
                where = f"of {count}, the {start} before these {size} were published, and "
                where += f"the {count - start - size} after them were not sent"
                if isinstance(error, PublishFailed):
                    raise PublishFailed(f"{error} ({where})", error.published) from error
                raise DurabilityNotReached(f"{error} ({where})", stored=error.stored) from error
            first = first or answers[0].id
            last = answers[-1].id
            no_subscribers += sum(answer.no_subscribers for answer in answers)
            progress.update(task, advance=len(answers))
    seconds = time.perf_counter() - began
    document = {
        "published": count,
        "no_subscribers": no_subscribers,
        "first_id": first,
        "last_id": last,
        "seconds": round(seconds, 3),
        "per_second": round(count / seconds),
    }
    nobody = f"; {_unwanted(topic)}" if no_subscribers else ""
    run.say(document, f"published {count:,} messages in {seconds:.2f} s, {count / seconds:,.0f}/s{nobody}")
