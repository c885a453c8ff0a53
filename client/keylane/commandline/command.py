"""How commands are made and run: the options they share, which broker they talk to, and how they end."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Concatenate, NoReturn, ParamSpec, TypeVar

import typer

from keylane.commandline.output import CommandError, Output, UsageError
from keylane.connect.seeds import DEFAULT_SERVER, named_server
from keylane.errors import BrokerError

__all__ = [
    "Globals",
    "JsonOption",
    "Run",
    "ServerOption",
    "add_command",
    "add_group_command",
    "help_of",
    "main",
    "new_app",
]

INTERRUPTED = 130  # as shells have it for Ctrl-C
_ClickError: Any = typer.BadParameter.__mro__[1]  # whichever copy of click typer works with

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Broker URL; by default $KEYLANE_SERVER, else port 9999 of this machine.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]


@dataclass(frozen=True)
class Globals:
    """The options in front of a command, which count as if they were behind it."""

    server: str | None = None
    json: bool = False


class Run(Output):
    """One run of a command: the broker it is for, how it prints, and how it ends.

    A subclass may add to `options`, which all of its commands have; the constructor takes their values.
    """

    options: ClassVar[Mapping[str, Any]] = {"server": ServerOption, "json": JsonOption}

    def __init__(self, server: str | None = None, json: bool = False) -> None:
        super().__init__(json)
        self.named_server = named_server(server)  # None: nobody has said which
        self.server = self.named_server or DEFAULT_SERVER

    def execute(self, action: Callable[[], object]) -> int:
        """Carry out a command and return the exit status."""
        try:
            action()
        except (BrokerError, CommandError) as error:
            return self.fail(error)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            return 0  # whoever read this has had enough
        except Exception as error:
            if (told := self.explain(error)) is None:
                raise
            return self.fail(told)
        return 0

    def explain(self, error: Exception) -> CommandError | None:
        """What to say about an error that is neither the broker's nor ours; None if it is a bug."""
        return None

    def call(self, action: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Call the function of a command."""
        action(self, **arguments)


R = TypeVar("R", bound=Run)
P = ParamSpec("P")
Action = Callable[Concatenate[R, P], Any]


def new_app(help_text: str, *, completion: bool = False) -> typer.Typer:
    """A command with commands; with `completion` it tells shells what can be typed."""
    return typer.Typer(
        no_args_is_help=True, add_completion=completion, pretty_exceptions_enable=False, help=help_text
    )


def add_command(app: typer.Typer, name: str, kind: type[R], action: Action[R, P]) -> None:
    """Make a function a command: it gets a Run first, then its own options beside those that all have."""
    app.command(name, help=help_of(action))(_runner(kind, action))


def add_group_command(app: typer.Typer, kind: type[R], action: Action[R, P]) -> None:
    """Make a function what a group of commands does when none of them is named."""
    app.callback(invoke_without_command=True, help=help_of(action))(_runner(kind, action))


def help_of(action: Callable[..., Any]) -> str:
    """The docstring of a command, a line for each paragraph: where to break it the terminal knows best."""
    paragraphs = (inspect.getdoc(action) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main(app: typer.Typer, name: str, arguments: list[str]) -> NoReturn:
    """Run a command line; what it cannot understand it says in the form that was asked for."""
    if "--json" not in arguments:
        app(args=arguments, prog_name=name)
    try:
        sys.exit(app(args=arguments, prog_name=name, standalone_mode=False))
    except _ClickError as error:
        sys.exit(Output(json=True).fail(UsageError(error.format_message())))


def _runner(kind: type[R], action: Action[R, P]) -> Callable[..., None]:
    """The function behind a command, with a signature that typer understands."""

    @functools.wraps(action)
    def run(ctx: typer.Context, **given: Any) -> None:
        before: Globals = ctx.find_root().obj or Globals()
        shared = {option: given.pop(option) for option in kind.options}
        shared["server"] = shared["server"] or before.server
        shared["json"] = shared["json"] or before.json
        if ctx.invoked_subcommand is not None:
            ctx.find_root().obj = Globals(shared["server"], shared["json"])
            return
        try:
            one = kind(**shared)
        except CommandError as error:
            raise typer.Exit(Output(shared["json"]).fail(error)) from None
        raise typer.Exit(one.execute(lambda: one.call(action, given)))

    own = list(inspect.signature(action).parameters.values())[1:]
    shared = [
        _keyword("ctx", typer.Context, inspect.Parameter.empty),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(_keyword(name, option, False if name == "json" else None) for name, option in kind.options.items()),
    ]
    run.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shared}
    return run


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
