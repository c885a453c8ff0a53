"""The `keylane` command."""

from typing import Annotated

import typer

from broker.commandline.demo import add_demo
from broker.commandline.doctor import add_doctor
from broker.commandline.peek import add_peek
from broker.commandline.publish import add_publish
from broker.commandline.serve import add_serve
from broker.commandline.session import DEFAULT_SERVER, Globals, JsonOption
from broker.commandline.subscribe import add_subscribe
from broker.commandline.subscriptions import subscriptions
from broker.commandline.topics import topics

__all__ = ["app", "main"]

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
add_doctor(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="keylane")


if __name__ == "__main__":
    main()
