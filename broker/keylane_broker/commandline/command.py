"""What the broker's commands share: a client, on an event loop."""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import typer

import keylane
from keylane.commandline.command import Run, add_command, add_group_command
from keylane.commandline.output import CommandError
from keylane_broker.errors import ServerError, unwrapped

__all__ = ["BrokerRun", "before_another_look", "command", "group_command"]

PATIENCE = 30.0  # seconds, through fail-overs
LOOK_SECONDS = 0.2  # between two looks at something that is waited for

P = ParamSpec("P")
Action = Callable[Concatenate["BrokerRun", P], Any]


class BrokerRun(Run):
    """One run of a command, which is a coroutine."""

    def client(self, timeout: float = PATIENCE) -> "keylane.AsyncClient":
        """A client of the broker, to be entered; answers may take so many seconds."""
        return keylane.AsyncClient(self.server, timeout=timeout)

    def call(self, action: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Run the coroutine of a command to its end."""
        import uvloop

        with unwrapped():
            uvloop.run(action(self, **arguments))

    def explain(self, error: Exception) -> CommandError | None:
        """Errors of Redis and of ports have a text for people."""
        return CommandError(str(error)) if isinstance(error, ServerError) else None


def command(app: typer.Typer, name: str) -> Callable[[Action[P]], Action[P]]:
    """Make a coroutine a command, with --server and --json beside its own options.

    @command(topics, "delete")
    async def delete(run: BrokerRun, topic: TopicArgument) -> None: ...
    """

    def register(action: Action[P]) -> Action[P]:
        add_command(app, name, BrokerRun, action)
        return action

    return register


def group_command(app: typer.Typer) -> Callable[[Action[P]], Action[P]]:
    """Make a coroutine what a group of commands does when none of them is named."""

    def register(action: Action[P]) -> Action[P]:
        add_group_command(app, BrokerRun, action)
        return action

    return register


async def before_another_look() -> None:
    """Wait a little, where a command waits for something that it has to ask for."""
    import asyncio  # takes a tenth of the time that --help has, and does not need it

    await asyncio.sleep(LOOK_SECONDS)
