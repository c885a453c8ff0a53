"""What every command shares: which broker it talks to, how it prints, and how it fails."""

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from keylane import AsyncClient, BrokerError

__all__ = [
    "DEFAULT_SERVER",
    "Globals",
    "JsonOption",
    "ServerOption",
    "Session",
    "Trouble",
    "Usage",
    "bare_command",
    "command",
]

DEFAULT_SERVER = "keylane://127.0.0.1:9999"
UNFOLDED = 1_000  # columns, where a program reads
PATIENCE = 30.0  # seconds, through fail-overs
INTERRUPTED = 130  # as shells have it for Ctrl-C

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help="Which broker; else KEYLANE_SERVER counts.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]

P = ParamSpec("P")
Action = Callable[Concatenate["Session", P], Coroutine[Any, Any, None]]


class Trouble(Exception):
    """Something that the command found wrong by itself; it ends with status 1."""

    code = "failed"
    retriable = False
    status = 1


class Usage(Trouble):
    """What was typed cannot be meant."""

    code = "usage"
    status = 2


@dataclass(frozen=True)
class Globals:
    """The options in front of the command."""

    server: str | None = None
    json: bool = False


class Session:
    """One run of a command."""

    def __init__(self, named_server: str | None, json: bool) -> None:
        self.named_server = named_server
        self.server = named_server or DEFAULT_SERVER
        self.json = json

    def client(self, timeout: float = PATIENCE) -> "AsyncClient":
        """A client of the broker, to be entered; answers may take so many seconds."""
        from keylane import AsyncClient

        return AsyncClient(self.server, timeout=timeout)

    @functools.cached_property
    def out(self) -> "Console":
        """Where people read; colours only if that is a terminal, folded only to the width of one."""
        from rich.console import Console

        terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
        return Console(highlight=False, width=None if terminal else UNFOLDED)

    def document(self, value: object) -> None:
        """Print a value as one line of JSON."""
        import msgspec

        self.write(json.dumps(msgspec.to_builtins(value), ensure_ascii=False) + "\n")

    def write(self, text: str) -> None:
        """Print text as it is, all of it; BrokenPipeError if nobody reads any more."""
        rest = memoryview(text.encode(sys.stdout.encoding, sys.stdout.errors or "strict"))
        try:
            sys.stdout.flush()
            while (
                rest
            ):  # with PYTHONUNBUFFERED a signal cuts a write short, and sys.stdout.write would not care
                rest = rest[sys.stdout.buffer.write(rest) :]
            sys.stdout.buffer.flush()
        except OSError as error:
            # Python would complain once more when it closes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise Trouble(f"cannot print what is to be printed: {error.strerror}") from None

    def lines(self, lines: Iterable[Sequence[tuple[str, str]]]) -> list[str]:
        """Lines for people to read, of parts that are a text and its style, as they are to be printed."""
        plain = not self.out.is_terminal
        texts = []
        for parts in lines:
            text = "".join([text for text, _ in parts])
            # What rich would print is the same there, at many times the cost.
            texts.append(f"{text}\n" if plain and text.isprintable() else self._styled(parts))
        return texts

    def _styled(self, parts: Sequence[tuple[str, str]]) -> str:
        from rich.text import Text

        with self.out.capture() as captured:
            self.out.print(Text.assemble(*parts), soft_wrap=True)
        return captured.get()

    def say(self, value: object, text: str) -> None:
        """Print a value as JSON, or the sentence that tells it."""
        if self.json:
            self.document(value)
        else:
            self.out.print(text, markup=False, soft_wrap=True)

    def table(self, value: object, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a value as JSON, or as a table."""
        if self.json:
            self.document(value)
        else:
            self.out.print(table(columns, rows))

    def properties(self, value: object) -> None:
        """Print a value as JSON, or its fields as a table."""
        import msgspec

        fields = msgspec.to_builtins(value)
        if self.json:
            self.document(fields)
        else:
            self.out.print(table(None, [(name.replace("_", " "), field) for name, field in fields.items()]))

    def note(self, text: str) -> None:
        """Tell people something beside the result."""
        sys.stderr.write(f"{text}\n")

    def run(self, action: Coroutine[Any, Any, None]) -> int:
        """Run a command's coroutine to its end and return the exit status."""
        import uvloop

        from keylane.errors import BrokerError
        from keylane_broker.errors import ServerError, unwrapped

        try:
            with unwrapped():
                uvloop.run(action)
        except (BrokerError, Trouble) as error:
            return self.fail(error)
        except ServerError as error:
            return self.fail(Trouble(str(error)))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            pass  # who read this has had enough
        return 0

    def fail(self, error: "BrokerError | Trouble") -> int:
        """Say what went wrong and return the exit status."""
        if self.json:
            problem = {"code": error.code, "message": str(error), "retriable": error.retriable}
            self.note(json.dumps({"error": problem}, ensure_ascii=False))
        else:
            self.note(f"error: {error}")
        return error.status if isinstance(error, Trouble) else 1


def table(columns: Sequence[str] | None, rows: Sequence[Sequence[object]]) -> "RenderableType":
    """A plain table; numbers to the right, what is too long for the terminal folded."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=columns is not None,
    )
    for place, column in enumerate(columns or ["", ""]):
        numbers = bool(rows) and all(isinstance(row[place], int | float) for row in rows)
        made.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(_shown(cell)) for cell in row))
    return made


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, list):
        return ", ".join(map(_shown, cell)) or "-"
    if isinstance(cell, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in cell.items()) or "-"
    if isinstance(cell, float):
        return f"{cell:g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def command(app: typer.Typer, name: str) -> Callable[[Action[P]], Action[P]]:
    """Make a coroutine a command, with --server and --json beside its own options.

    @command(topics, "delete")
    async def delete(session: Session, topic: TopicArgument) -> None: ...
    """

    def register(action: Action[P]) -> Action[P]:
        app.command(name)(_runner(action))
        return action

    return register


def bare_command(app: typer.Typer) -> Callable[[Action[P]], Action[P]]:
    """Make a coroutine what a group of commands does when none of them is named."""

    def register(action: Action[P]) -> Action[P]:
        app.callback(invoke_without_command=True)(_runner(action))
        return action

    return register


def _runner(action: Action[P]) -> Callable[..., None]:
    """The function behind a command, with a signature that typer understands."""

    @functools.wraps(action)
    def run(ctx: typer.Context, server: str | None, json: bool, **arguments: Any) -> None:
        before: Globals = ctx.find_root().obj
        if ctx.invoked_subcommand is not None:
            ctx.find_root().obj = Globals(server or before.server, json or before.json)
            return
        session = Session(server or before.server, json or before.json)
        raise typer.Exit(session.run(action(session, **arguments)))  # type: ignore[call-arg]

    own = list(inspect.signature(action).parameters.values())[1:]
    shared = [
        _keyword("ctx", typer.Context, inspect.Parameter.empty),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        _keyword("server", ServerOption, None),
        _keyword("json", JsonOption, False),
    ]
    run.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shared}
    return run


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
