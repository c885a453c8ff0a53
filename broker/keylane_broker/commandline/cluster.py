"""`keylane cluster`: which worker serves what, and how to change it."""

from time import monotonic
from typing import Annotated

import msgspec
import typer

import keylane
from keylane import PartitionInfo
from keylane.commandline.output import CommandError
from keylane.commandline.words import count_of
from keylane_broker.commandline import cluster_view as view
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import BrokerRun, before_another_look, command, group_command
from keylane_broker.commandline.partitions import all_partitions

__all__ = ["cluster"]

ANSWER_SECONDS = 10.0  # to show something: if it takes longer, that is what is to be seen
MOVE_SECONDS = 15.0  # more than the lease of a worker that is lost in the middle of it

cluster = typer.Typer(help="Show workers and partitions; move partitions, drain workers.")

WorkerArgument = Annotated[
    str, typer.Argument(metavar="WORKER", help="Worker id, or an unambiguous prefix of it.")
]


@group_command(cluster)
async def show(
    run: BrokerRun,
    topic: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Show the partitions of this topic.", show_default=False),
    ] = None,
) -> None:
    """Show workers and partitions; move partitions, drain workers."""
    async with run.client(timeout=ANSWER_SECONDS) as client:
        if topic is None:
            await _show_workers(run, client)
        else:
            await _show_partitions(run, client, topic)


async def _show_workers(run: BrokerRun, client: "keylane.AsyncClient") -> None:
    report = await client.cluster()
    now = (await client.info()).time
    warnings = view.worker_warnings(report, now) + view.partition_warnings(await all_partitions(client))
    about = {**msgspec.to_builtins(report), "warnings": warnings}
    run.table(about, view.WORKER_COLUMNS, view.worker_rows(report, now))
    if not run.json:
        run.out.print(f"\n{view.totals(report)}", markup=False, soft_wrap=True)
        _warn(run, warnings)


async def _show_partitions(run: BrokerRun, client: "keylane.AsyncClient", topic: str) -> None:
    partitions = await client.partitions(topic)
    warnings = view.partition_warnings({topic: partitions})
    about = {"topic": topic, "partitions": msgspec.to_builtins(partitions), "warnings": warnings}
    run.table(about, view.PARTITION_COLUMNS, view.partition_rows(partitions))
    if not run.json:
        _warn(run, warnings)


def _warn(run: BrokerRun, warnings: list[str]) -> None:
    for warning in warnings:
        run.out.print(f"\nwarning: {warning}", style="yellow", markup=False, soft_wrap=True)


@command(cluster, "move")
async def move(
    run: BrokerRun,
    topic: TopicArgument,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="Partition number.", min=0)],
    worker: WorkerArgument,
) -> None:
    """Move a partition to a worker; another one may move back, to keep counts even."""
    async with run.client() as client:
        target = await _find(client, worker)
        await client.move_partition(topic, partition, target)
        now = await _await_moved(client, topic, partition, target)
    about = {"topic": topic, **msgspec.to_builtins(now)}
    run.say(about, f"partition {partition} of {topic!r} is served by {target}, in epoch {now.epoch}")


async def _await_moved(
    client: "keylane.AsyncClient", topic: str, partition: int, target: str
) -> PartitionInfo:
    """Wait until a worker has the lease of a partition that has been given to it."""
    end = monotonic() + MOVE_SECONDS
    while monotonic() < end:
        now = (await client.partitions(topic))[partition]
        if now.holder == target:
            return now
        await before_another_look()
    raise CommandError(
        f"partition {partition} of {topic!r} was given to {target}, which does not hold its lease after "
        f"{MOVE_SECONDS:.0f} s; see the log of that worker"
    )


@command(cluster, "drain")
async def drain(
    run: BrokerRun,
    worker: WorkerArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Undo a drain: let it have partitions again.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has no partitions.")] = True,
) -> None:
    """Drain a worker: move all its partitions away, so that it can be stopped. A restart ends the drain."""
    async with run.client() as client:
        name = await _find(client, worker)
        if undo:
            await client.undrain_worker(name)
            run.say({"worker": name, "draining": False}, f"{name} takes partitions again")
            return
        await client.drain_worker(name)
        left = 0
        if wait:
            await _await_drained(run, client, name)
        else:
            left = await _left(client, name)
    text = (
        f"is draining, {count_of(left, 'partition')} left" if left else "has no partitions and can be stopped"
    )
    run.say({"worker": name, "draining": True, "partitions": left}, f"{name} {text}")


async def _await_drained(run: BrokerRun, client: "keylane.AsyncClient", name: str) -> None:
    """Wait until a worker neither is to serve nor holds any partition, and report progress."""
    shown = 0
    while left := await _left(client, name):
        states = {worker.id: worker.state for worker in (await client.cluster()).workers}
        if states.get(name) == "serving":
            raise CommandError(f"{name} no longer drains: the drain was undone, or the worker was restarted")
        if left != shown and not run.json:
            run.note(f"{name}: {count_of(left, 'partition')} left")
        shown = left
        await before_another_look()


async def _left(client: "keylane.AsyncClient", name: str) -> int:
    partitions = (info for infos in (await all_partitions(client)).values() for info in infos)
    return sum(name in (info.worker, info.holder) for info in partitions)


async def _find(client: "keylane.AsyncClient", worker: str) -> str:
    return view.find_worker(worker, [known.id for known in (await client.cluster()).workers])
