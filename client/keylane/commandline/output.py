"""How commands print: JSON for programs, text and tables for people, notes and errors to stderr."""

import codecs
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

import msgspec

if TYPE_CHECKING:  # rich takes a while to import, which --json does not need
    from rich.console import Console, RenderableType
    from rich.progress import Progress

__all__ = ["CommandError", "Failure", "Output", "UsageError", "encoded", "make_table", "progress_bar"]

UNFOLDED = 1_000  # columns, where a program reads
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}  # not \t and \n


class Failure(Protocol):
    """What an error tells programs: BrokerError and CommandError both do."""

    @property
    def code(self) -> str: ...
    @property
    def retriable(self) -> bool: ...


class CommandError(Exception):
    """A command cannot do what it was asked to; it exits with `status`."""

    def __init__(self, text: str, *, code: str = "failed", retriable: bool = False, status: int = 1) -> None:
        super().__init__(text)
        self.code, self.retriable, self.status = code, retriable, status


class UsageError(CommandError):
    """What was typed makes no sense; the command exits with 2."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code="usage", status=2)


class _Stdout:
    """sys.stdout for rich, which writes what its encoding does not have, too, and says why it cannot."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class Output:
    """Prints the results of one run of a command, as JSON if `json`."""

    def __init__(self, json: bool) -> None:
        self.json = json

    @functools.cached_property
    def out(self) -> "Console":
        """Where people read; colours only if that is a terminal, folded only to the width of one."""
        from rich.console import Console

        terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
        file = cast("TextIO", _Stdout(self.write))
        width = None if terminal else UNFOLDED
        console = Console(file=file, highlight=False, emoji=False, width=width)
        console.on_broken_pipe = _leave_it  # type: ignore[method-assign] # rich would exit with 1
        return console

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
            self.out.print(make_table(columns, rows))

    def properties(self, value: object) -> None:
        """Print a value as JSON, or its fields as a table."""
        fields = msgspec.to_builtins(value)
        if self.json:
            self.document(fields)
        else:
            self.out.print(
                make_table(None, [(name.replace("_", " "), field) for name, field in fields.items()])
            )

    def document(self, value: object) -> None:
        """Print a value as one line of JSON."""
        self.write(encoded(msgspec.to_builtins(value), sys.stdout))

    def write(self, text: str) -> None:
        """Print text as it is, all of it; BrokenPipeError if nobody reads any more."""
        rest = memoryview(text.encode(sys.stdout.encoding, "backslashreplace"))
        try:
            sys.stdout.flush()
            # With PYTHONUNBUFFERED a signal cuts a write short, and sys.stdout.write would not care.
            while rest:
                rest = rest[sys.stdout.buffer.write(rest) :]
            sys.stdout.buffer.flush()
        except OSError as error:
            # Python would complain once more when it closes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise CommandError(f"cannot write to stdout: {error.strerror}") from None

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

        if self.out.is_terminal:
            parts = [(_harmless(text), style) for text, style in parts]
        with self.out.capture() as captured:
            self.out.print(Text.assemble(*parts), soft_wrap=True)
        return captured.get()

    def note(self, text: str) -> None:
        """Tell people something beside the result, such as progress, on stderr."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def fail(self, error: Failure) -> int:
        """Say what went wrong and return the exit status."""
        if self.json:
            problem = {"code": error.code, "message": str(error), "retriable": error.retriable}
            self.note(encoded({"error": problem}, sys.stderr).rstrip())
        else:
            self.note(f"error: {error}")
        return error.status if isinstance(error, CommandError) else 1


def encoded(value: object, stream: TextIO) -> str:
    """A line of JSON, in which all is escaped that the encoding of a stream may not have."""
    return json.dumps(value, ensure_ascii=codecs.lookup(stream.encoding or "ascii").name != "utf-8") + "\n"


def _leave_it() -> None:
    """Called where rich has caught a BrokenPipeError, which is then on its way again."""
    raise


def progress_bar() -> "Progress":
    """A progress bar on stderr, shown only if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def make_table(columns: Sequence[str] | None, rows: Sequence[Sequence[object]]) -> "RenderableType":
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
        cells = [row[place] for row in rows if row[place] not in (None, "")]
        numbers = bool(cells) and all(isinstance(cell, int | float) for cell in cells)
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
    if isinstance(cell, datetime):
        return f"{cell:%Y-%m-%d %H:%M:%S}Z"  # all of them are in UTC
    return f"{cell:,}" if isinstance(cell, int) else _harmless(str(cell))


def _harmless(text: str) -> str:
    """Text without what controls a terminal: whoever publishes decides about keys, reasons and bodies."""
    return text.translate(CONTROLS)
