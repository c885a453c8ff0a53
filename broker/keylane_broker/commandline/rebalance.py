"""`keylane rebalance`: place partitions anew, or follow a plan of moves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated

import msgspec
import typer

import keylane
from keylane import PartitionInfo, PartitionMove
from keylane.commandline.output import CommandError
from keylane.commandline.rebalance_plan import PlannedMove, read_plan
from keylane.commandline.words import count_of
from keylane_broker.commandline import cluster_view as view
from keylane_broker.commandline.command import BrokerRun, before_another_look, command
from keylane_broker.commandline.partitions import all_partitions

__all__ = ["add_rebalance"]

MOVE_SECONDS = 30.0  # for all of them to arrive, from the last decision on

Place = tuple[str, int]


def add_rebalance(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "rebalance")(rebalance)


async def rebalance(
    run: BrokerRun,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Follow this plan, as written by `keylane pipeline skew`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Rebalance now: give every partition an owner, even out counts, then load (as happens by itself)."""
    if plan is not None:
        await _follow(run, plan, dry_run=dry_run)
        return
    async with run.client() as client:
        moves = await client.rebalance(dry_run=dry_run)
    about = {"dry_run": dry_run, "moves": msgspec.to_builtins(moves)}
    if not moves:
        run.say(about, "nothing to move")
        return
    run.table(about, view.MOVE_COLUMNS, view.move_rows(moves))
    if not run.json:
        count = count_of(len(moves), "partition")
        run.out.print(f"\n{count} {'would move' if dry_run else 'moved'}")


async def _follow(run: BrokerRun, path: Path, *, dry_run: bool) -> None:
    """Check a plan, make its moves, and return when the new owners serve."""
    plan = read_plan(path)
    async with run.client() as client:
        report = await client.cluster()
        owners = await _owners(client)
        check(plan, owners, [worker.id for worker in report.workers if worker.state == "serving"])
        moves = moves_of(plan, owners)
        # Who places partitions leaves alone for a while what it was told to move: so it is the one to tell.
        address = next((worker.address for worker in report.workers if worker.id == report.controller), "")
        if moves and not dry_run:
            async with keylane.AsyncClient(f"keylane://{address}" if address else run.server) as controller:
                await _make(controller, plan)
                await _await_served(controller, plan)
    about = {
        "dry_run": dry_run,
        "moves": msgspec.to_builtins(moves),
        "already": len(plan) - len(moves),
    }
    if not moves:
        there = f"all {count_of(len(plan), 'partition')} are there already" if plan else "the plan is empty"
        run.say(about, f"nothing to move: {there}")
        return
    run.table(about, view.MOVE_COLUMNS, view.move_rows(moves))
    if not run.json:
        count = count_of(len(moves), "partition")
        there = f", {len(plan) - len(moves)} are there already" if len(plan) > len(moves) else ""
        run.out.print(f"\n{count} {'would move' if dry_run else 'moved'}{there}")


def check(plan: Sequence[PlannedMove], owners: Mapping[Place, str], workers: Sequence[str]) -> None:
    """Raise CommandError if a plan cannot be followed, or would be undone at once."""
    from keylane_broker.cluster.placement import place

    topics = Counter(topic for topic, _ in owners)
    for move in plan:
        if move.topic not in topics:
            raise CommandError(f"no topic {move.topic!r}; there are {', '.join(sorted(topics)) or 'none'}")
        if (move.topic, move.partition) not in owners:
            raise CommandError(
                f"topic {move.topic!r} has no partition {move.partition}: "
                f"it has 0 to {topics[move.topic] - 1}"
            )
        if move.worker not in workers:
            there = ", ".join(sorted(workers)) or "none"
            raise CommandError(f"worker {move.worker!r} cannot take partitions; those that can: {there}")
    planned = {(move.topic, move.partition): move.worker for move in plan}
    after = {**owners, **planned}
    undone = [
        f"{move.topic}:{move.partition} of {move.source}"
        for move in place(dict(topics), after, workers, stay=list(planned))
        if (move.topic, move.partition) in planned
    ]
    if undone:
        raise CommandError(
            f"the plan gives some workers more partitions than others, which the cluster would undo at once "
            f"({', '.join(undone[:5])}): counts must be even within one; make a new plan"
        )


def moves_of(plan: Sequence[PlannedMove], owners: Mapping[Place, str]) -> list[PartitionMove]:
    """What of a plan is not so yet."""
    return [
        PartitionMove(move.topic, move.partition, owners[move.topic, move.partition], move.worker, "planned")
        for move in plan
        if owners[move.topic, move.partition] != move.worker
    ]


async def _make(client: "keylane.AsyncClient", plan: Sequence[PlannedMove]) -> None:
    """Move one after the other; what is where the plan has it is not taken in exchange."""
    for _ in range(len(plan)):
        owners = await _owners(client)
        left = [move for move in plan if owners.get((move.topic, move.partition)) != move.worker]
        if not left:
            return
        there = [(move.topic, move.partition) for move in plan if move not in left]
        move = left[0]
        await client.move_partition(move.topic, move.partition, move.worker, keep=there)
    if moves_of(plan, await _owners(client)):
        raise CommandError(
            "the placement changed while the plan was followed; see `keylane cluster`, and try again"
        )


async def _await_served(client: "keylane.AsyncClient", plan: Sequence[PlannedMove]) -> None:
    """Wait until the workers have the leases of what they were given."""
    end = monotonic() + MOVE_SECONDS
    while True:
        states = await _partitions(client, plan)
        late = [
            f"{move.topic}:{move.partition}"
            for move in plan
            if states[move.topic][move.partition].holder != move.worker
        ]
        if not late:
            return
        if monotonic() > end:
            raise CommandError(
                f"{count_of(len(late), 'partition')} ({', '.join(late[:5])}) were given to a worker "
                f"that does not hold the lease after {MOVE_SECONDS:.0f} s; see the log of that worker"
            )
        await before_another_look()


async def _partitions(
    client: "keylane.AsyncClient", plan: Sequence[PlannedMove]
) -> dict[str, list[PartitionInfo]]:
    return {topic: await client.partitions(topic) for topic in sorted({move.topic for move in plan})}


async def _owners(client: "keylane.AsyncClient") -> dict[Place, str]:
    """The worker of every partition of every topic."""
    return {
        (topic, info.partition): info.worker
        for topic, infos in (await all_partitions(client)).items()
        for info in infos
    }
