"""`keylane cluster` and `keylane rebalance`: who serves what, and how to change it."""

import asyncio
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from keylane_broker.commandline import cluster_view as view
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import Session, Trouble, bare_command, command

if TYPE_CHECKING:
    from keylane import AsyncClient, PartitionInfo

__all__ = ["add_rebalance", "all_partitions", "cluster"]

ANSWER_SECONDS = 10.0  # to show something: if it takes longer, that is what is to be seen
LOOK_SECONDS = 0.2  # between two looks at something that is waited for
MOVE_SECONDS = 15.0  # more than the lease of a worker that is lost in the middle of it

cluster = typer.Typer(help="Show the workers and who serves what; move partitions, drain workers.")

WorkerArgument = Annotated[
    str, typer.Argument(metavar="WORKER", help="The worker, or a clear beginning of its name.")
]


@bare_command(cluster)
async def show(
    session: Session,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Show the partitions of a topic.", show_default=False)
    ] = None,
) -> None:
    """Show the workers, or the partitions of a topic; move partitions, drain workers."""
    async with session.client(timeout=ANSWER_SECONDS) as client:
        if topic is None:
            await _show_workers(session, client)
        else:
            await _show_partitions(session, client, topic)


async def _show_workers(session: Session, client: "AsyncClient") -> None:
    import msgspec

    report = await client.cluster()
    now = (await client.info()).time
    troubles = view.worker_troubles(report, now) + view.partition_troubles(await all_partitions(client))
    about = {**msgspec.to_builtins(report), "warnings": troubles}
    session.table(about, view.WORKER_COLUMNS, view.worker_rows(report, now))
    if not session.json:
        session.out.print(f"\n{view.totals(report)}", markup=False, soft_wrap=True)
        _warn(session, troubles)


async def _show_partitions(session: Session, client: "AsyncClient", topic: str) -> None:
    import msgspec

    partitions = await client.partitions(topic)
    troubles = view.partition_troubles({topic: partitions})
    about = {"topic": topic, "partitions": msgspec.to_builtins(partitions), "warnings": troubles}
    session.table(about, view.PARTITION_COLUMNS, view.partition_rows(partitions))
    if not session.json:
        _warn(session, troubles)


def _warn(session: Session, troubles: list[str]) -> None:
    for trouble in troubles:
        session.out.print(f"\nwarning: {trouble}", style="yellow", markup=False, soft_wrap=True)


async def all_partitions(client: "AsyncClient") -> "dict[str, list[PartitionInfo]]":
    """The partitions of every topic."""
    from keylane.errors import TopicNotFound

    found = {}
    for topic in sorted(await client.topics()):
        try:
            found[topic] = await client.partitions(topic)
        except TopicNotFound:
            continue  # gone since
    return found


@command(cluster, "move")
async def move(
    session: Session,
    topic: TopicArgument,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="Its number.", min=0)],
    worker: WorkerArgument,
) -> None:
    """Give a partition to a worker; to keep counts even, another one may go the other way."""
    import msgspec

    async with session.client() as client:
        target = await _find(client, worker)
        await client.move_partition(topic, partition, target)
        now = await _await_moved(client, topic, partition, target)
    about = {"topic": topic, **msgspec.to_builtins(now)}
    session.say(about, f"partition {partition} of {topic!r} is served by {target}, in epoch {now.epoch}")


async def _await_moved(client: "AsyncClient", topic: str, partition: int, target: str) -> "PartitionInfo":
    """Wait until a worker has the lease of a partition that has been given to it."""
    end = monotonic() + MOVE_SECONDS
    while monotonic() < end:
        now = (await client.partitions(topic))[partition]
        if now.holder == target:
            return now
        await asyncio.sleep(LOOK_SECONDS)
    raise Trouble(
        f"partition {partition} of {topic!r} has been given to {target}, which does not hold its lease after "
        f"{MOVE_SECONDS:.0f} s; see its log"
    )


@command(cluster, "drain")
async def drain(
    session: Session,
    worker: WorkerArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Let it have partitions again.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has no partitions.")] = True,
) -> None:
    """Take all partitions from a worker, so that it can be stopped; a worker that starts drains no more."""
    async with session.client() as client:
        name = await _find(client, worker)
        if undo:
            await client.undrain_worker(name)
            session.say({"worker": name, "draining": False}, f"{name} takes partitions again")
            return
        await client.drain_worker(name)
        left = 0
        if wait:
            await _await_drained(session, client, name)
        else:
            left = await _left(client, name)
    text = (
        f"drains, {view.count_of(left, 'partition')} left" if left else "has no partitions: it can be stopped"
    )
    session.say({"worker": name, "draining": True, "partitions": left}, f"{name} {text}")


async def _await_drained(session: Session, client: "AsyncClient", name: str) -> None:
    """Wait until a worker neither is to serve nor holds any partition, and tell how far it is."""
    shown = 0
    while left := await _left(client, name):
        states = {worker.id: worker.state for worker in (await client.cluster()).workers}
        if states.get(name) == "serving":
            raise Trouble(f"{name} drains no more: somebody has undone it, or started it again")
        if left != shown and not session.json:
            session.note(f"{name}: {view.count_of(left, 'partition')} left")
        shown = left
        await asyncio.sleep(LOOK_SECONDS)


async def _left(client: "AsyncClient", name: str) -> int:
    partitions = (info for infos in (await all_partitions(client)).values() for info in infos)
    return sum(name in (info.worker, info.holder) for info in partitions)


async def _find(client: "AsyncClient", worker: str) -> str:
    return view.find_worker(worker, [known.id for known in (await client.cluster()).workers])


def add_rebalance(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "rebalance")(rebalance)


async def rebalance(
    session: Session,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Move what a plan says, such as `keylane pipeline skew` writes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Place partitions now: every one owned, counts even, then load; the cluster also does so by itself."""
    import msgspec

    if plan is not None:
        from keylane_broker.commandline.plan import follow

        await follow(session, plan, dry_run=dry_run)
        return
    async with session.client() as client:
        moves = await client.rebalance(dry_run=dry_run)
    about = {"dry_run": dry_run, "moves": msgspec.to_builtins(moves)}
    if not moves:
        session.say(about, "nothing to move")
        return
    session.table(about, view.MOVE_COLUMNS, view.move_rows(moves))
    if not session.json:
        count = view.count_of(len(moves), "partition")
        session.out.print(f"\n{count} {'would move' if dry_run else 'moved'}")
