"""The file with a plan of moves: `keylane pipeline skew` writes it, `keylane rebalance --plan` follows it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keylane.commandline.output import UsageError

__all__ = ["PlannedMove", "dump_plan", "read_plan"]

VERSION = 1


class PlannedMove(msgspec.Struct, frozen=True):
    """The worker that is to serve a partition."""

    topic: str
    partition: int
    worker: str


class _Plan(msgspec.Struct, frozen=True):
    """A file with a plan; whatever else is in it is for people."""

    version: int
    moves: list[PlannedMove]


def dump_plan(moves: Sequence[PlannedMove], **about: object) -> str:
    """The text of a file; `about` is for people."""
    plan = {"version": VERSION, **about, "moves": moves}
    return msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n"


def read_plan(path: Path) -> list[PlannedMove]:
    """The moves of a file, each partition once; UsageError says what is wrong with it."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=_Plan)
    except OSError as error:
        raise UsageError(f"cannot read the plan: {error}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a plan: {error}; see `keylane pipeline skew`") from None
    if plan.version != VERSION:
        raise UsageError(f"{path} is a plan of version {plan.version}; this release reads version {VERSION}")
    often = Counter((move.topic, move.partition) for move in plan.moves)
    twice = [f"{topic}:{partition}" for (topic, partition), times in often.items() if times > 1]
    if twice:
        raise UsageError(f"{path} names a partition more than once: {', '.join(twice[:5])}")
    return plan.moves
