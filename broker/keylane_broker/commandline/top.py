"""`keylane top`: the busiest topics, their backlogs and the workers, again and again."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

import keylane
from keylane.commandline.output import make_table
from keylane.errors import BrokerError, SubscriptionNotFound, TopicNotFound
from keylane.types import SubscriptionInfo, TopicInfo
from keylane_broker.commandline import cluster_view
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.signals import cancel_on_signal
from keylane_broker.commandline.top_view import Look, Top, fitting, top_of, topic_rows

if TYPE_CHECKING:  # slow to import
    from rich.console import RenderableType

__all__ = ["add_top"]

TOGETHER = 20  # topics that are asked for at once
ANSWER_SECONDS = 10.0


def add_top(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "top")(top)


async def top(
    run: BrokerRun,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Seconds between looks.", min=0.1)
    ] = 2.0,
    limit: Annotated[int, typer.Option("--max", help="Maximum of topics to show.", min=1)] = 20,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and exit.")] = False,
) -> None:
    """Show topics, rates, backlogs and workers, the busiest first, until Ctrl-C.

    Rates are those between two looks. With --json there is a document for each of them.
    """
    import anyio

    async with run.client(timeout=ANSWER_SECONDS) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        before = await _look(client)
        if run.json or once or not sys.stdout.isatty():
            await _print(run, client, before, interval, limit, once=once)
        else:
            await _watch(run, client, before, interval, limit)
        tasks.cancel_scope.cancel()


async def _print(
    run: BrokerRun, client: "keylane.AsyncClient", before: Look, interval: float, limit: int, *, once: bool
) -> None:
    import anyio

    while True:
        await anyio.sleep(interval)
        now = await _look(client)
        found = top_of(before, now, limit)
        if run.json:
            run.document(found)
        else:
            run.out.print(_screen(run, found))
        if once:
            return
        before = now


async def _watch(
    run: BrokerRun, client: "keylane.AsyncClient", before: Look, interval: float, limit: int
) -> None:
    """Show it on the whole terminal; a broker that does not answer is waited for."""
    import anyio
    from rich.live import Live

    found, trouble = top_of(before, before, limit), ""
    with Live(_screen(run, found), console=run.out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(run, found, trouble), refresh=True)
            await anyio.sleep(interval)
            try:
                now = await _look(client)
            except BrokerError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            found, before, trouble = top_of(before, now, limit), now, ""


async def _look(client: "keylane.AsyncClient") -> Look:
    import asyncio

    report, info, names = await asyncio.gather(client.cluster(), client.info(), client.topics())
    seconds = time.monotonic()
    topics: dict[str, TopicInfo] = {}
    subscriptions: dict[tuple[str, str], SubscriptionInfo] = {}

    async def describe(name: str) -> None:
        try:
            topics[name] = about = await client.describe_topic(name)
        except TopicNotFound:
            return  # gone since
        for subscription in about.subscriptions:
            try:
                found = await client.describe_subscription(name, subscription)
            except (SubscriptionNotFound, TopicNotFound):
                continue
            subscriptions[name, subscription] = found

    for at in range(0, len(names), TOGETHER):
        await asyncio.gather(*map(describe, names[at : at + TOGETHER]))
    return Look(seconds, info.time, report, topics, subscriptions)


def _screen(run: BrokerRun, found: Top, trouble: str = "") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    published = sum(topic.published_per_second for topic in found.topics)
    parts: list[RenderableType] = [
        Text(f"keylane top  {found.time:%H:%M:%S} UTC  {run.server}  {published:,.0f} published/s"),
        Text(f"error: {trouble}", style="red") if trouble else Text(""),
        make_table(*fitting(topic_rows(found), run.out.width)),
    ]
    if found.left_out:
        parts.append(Text(f"and {found.left_out:,} more topics, see --max"))
    parts += [
        Text(""),
        make_table(cluster_view.WORKER_COLUMNS, cluster_view.worker_rows(found.cluster, found.time)),
    ]
    parts += [
        Text(f"warning: {warning}", style="yellow")
        for warning in cluster_view.worker_warnings(found.cluster, found.time)
    ]
    return Group(*parts)
