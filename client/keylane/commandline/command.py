"""How commands are made and run: the options they share, which broker they talk to, and how they end."""

import functools
import inspect
import os
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
    """Run a command line; what it cannot understand it says in one line, in the form that was asked for."""
    _open_missing_streams()
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]  # from a terminal that does not know; rich would print nothing
    output = Output(json="--json" in arguments)
    try:
        _check_text(arguments)
        command = typer.main.get_command(app)
        for group in (command, *getattr(command, "commands", {}).values()) if output.json else ():
            group.no_args_is_help = False  # help is no JSON; that a command is missing can be told
        status = command.main(arguments, name, standalone_mode=False)
    except _ClickError as error:
        text = error.format_message()  # none where help has been printed instead
        status = output.fail(UsageError(_complaint(error))) if text else error.exit_code
    except CommandError as error:
        status = output.fail(error)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED  # while the commands were being put together
    except SystemExit as ended:
        # rich and typer end so when whoever read their help has had enough.
        status = 0 if isinstance(ended.__context__, BrokenPipeError) else ended.code
    sys.exit(status)


def _open_missing_streams() -> None:
    """Where a stream was closed, as by `<&-`, open one to nowhere: else the next file takes its number."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end


def _check_text(arguments: list[str]) -> None:
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"argument {os.fsencode(word)!r} is not valid UTF-8; `keylane publish TOPIC -` publishes "
                "any bytes from stdin"
            ) from None


def _complaint(error: Any) -> str:
    """What typer complains of, and where there is more."""
    text: str = error.format_message().rstrip(".").replace(": Value error, ", ": ")
    where = f". See `{error.ctx.command_path} --help`" if getattr(error, "ctx", None) else ""
    return text + (where if text[-1] not in "?!" else where[1:])


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
