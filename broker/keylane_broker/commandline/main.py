"""The `keylane` command."""

import sys
from typing import Annotated, Any

import typer

from keylane_broker.commandline.cluster import add_rebalance, cluster
from keylane_broker.commandline.command import DEFAULT_SERVER, Globals, JsonOption, Session, Usage
from keylane_broker.commandline.demo import add_demo
from keylane_broker.commandline.doctor import add_doctor
from keylane_broker.commandline.peek import add_peek
from keylane_broker.commandline.publish import add_publish
from keylane_broker.commandline.serve import add_serve
from keylane_broker.commandline.subscribe import add_subscribe
from keylane_broker.commandline.subscriptions import subscriptions
from keylane_broker.commandline.topics import topics
from keylane_spark.commandline.main import pipeline

__all__ = ["app", "main"]

UsageError: Any = typer.BadParameter.__mro__[1]  # whichever copy of click typer works with

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keylane: a message broker on Redis.",
)


@app.callback()
def keylane(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="KEYLANE_SERVER", help=f"Which broker; {DEFAULT_SERVER} by default."
        ),
    ] = None,
    json: JsonOption = False,
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
app.add_typer(cluster, name="cluster")
add_rebalance(app)
app.add_typer(pipeline, name="pipeline")
add_doctor(app)


def main() -> None:
    """Run the command line; what it cannot understand it says in the form that was asked for."""
    if "--json" not in sys.argv:
        app(prog_name="keylane")
    try:
        sys.exit(app(prog_name="keylane", standalone_mode=False))
    except UsageError as error:
        sys.exit(Session(None, json=True).fail(Usage(error.format_message())))


if __name__ == "__main__":
    main()
