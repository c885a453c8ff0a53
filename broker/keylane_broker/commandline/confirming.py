"""Asking before something is gone for good, where somebody can be asked."""

import sys
from typing import Annotated

import typer

from keylane.commandline.output import CommandError
from keylane_broker.commandline.command import BrokerRun
from keylane_broker.commandline.stdin import read_line

__all__ = ["YesOption", "can_ask", "confirm"]

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def can_ask(run: BrokerRun) -> bool:
    """Whether a person is at the terminal; scripts are not, and what they say counts."""
    return not run.json and sys.stdin.isatty()


async def confirm(run: BrokerRun, question: str) -> None:
    """Ask; unless the answer is yes the command ends, with nothing done."""
    run.note(f"{question} [y/N]")
    if (await read_line()).strip().lower() not in ("y", "yes"):
        raise CommandError("cancelled: nothing was done", code="cancelled")
