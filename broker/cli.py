"""The `keylane` command."""

import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from broker.demo import tour
from broker.server import Server

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keylane: a message broker on Redis.")
out = Console(highlight=False)


@app.callback()
def keylane() -> None:
    """Keylane: a message broker on Redis."""


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Exit after the tour.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep the data here; by default it is thrown away.")
    ] = None,
) -> None:
    """Start the embedded server and show what the engine does, step by step."""
    with Server(data_dir=data_dir) as server:
        out.print(f"[bold]Valkey[/bold] is up at {server.url}, append-only, data in {server.data_dir}")
        uvloop.run(tour(server.url, out.print))
        if not once:
            out.print(f"\nLook around with [bold]redis-cli -p {server.port}[/bold]; Ctrl-C stops the server.")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


def main() -> None:
    """Run the command line."""
    app()
