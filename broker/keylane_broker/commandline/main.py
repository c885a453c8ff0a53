"""The `keylane` command."""

import sys
from typing import Annotated

import typer

from keylane.commandline import command
from keylane.commandline.command import Globals, JsonOption, ServerOption, new_app
from keylane.commandline.output import Output
from keylane_broker.commandline.cluster import cluster
from keylane_broker.commandline.dead_letters import dead_letters
from keylane_broker.commandline.demo import add_demo
from keylane_broker.commandline.doctor import add_doctor
from keylane_broker.commandline.lanes import lanes
from keylane_broker.commandline.messages import add_message_commands
from keylane_broker.commandline.peek import add_peek
from keylane_broker.commandline.publish import add_publish
from keylane_broker.commandline.rebalance import add_rebalance
from keylane_broker.commandline.serve import add_serve
from keylane_broker.commandline.subscribe import add_subscribe
from keylane_broker.commandline.subscriptions import subscriptions
from keylane_broker.commandline.tokens import tokens
from keylane_broker.commandline.top import add_top
from keylane_broker.commandline.topics import add_hot_keys, topics
from keylane_spark.commandline.main import pipeline

__all__ = ["app", "main"]

app = new_app("Keylane: a message broker on Redis.", completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from keylane import __version__

        as_json = "--json" in sys.argv[1:]  # it may come behind, and is not read yet
        Output(as_json).say({"version": __version__}, f"keylane {__version__}")
        raise typer.Exit


@app.callback()
def keylane(
    ctx: typer.Context,
    server: ServerOption = None,
    json: JsonOption = False,
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Keylane: a message broker on Redis."""
    ctx.obj = Globals(server, json)


add_serve(app)
add_demo(app)
app.add_typer(topics, name="topic")
add_publish(app)
add_subscribe(app)
app.add_typer(subscriptions, name="subscription")
add_peek(app)
add_message_commands(app)
app.add_typer(dead_letters, name="dlq")
app.add_typer(lanes, name="lanes")
add_hot_keys(app)
app.add_typer(cluster, name="cluster")
app.add_typer(tokens, name="token")
add_rebalance(app)
add_top(app)
app.add_typer(pipeline, name="pipeline")
add_doctor(app)


def main() -> None:
    """Run the command line."""
    command.main(app, "keylane", sys.argv[1:])


if __name__ == "__main__":
    main()
