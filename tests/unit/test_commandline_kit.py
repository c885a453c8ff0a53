"""The command-line kit that broker and pipeline share, without a broker."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import typer
from typer.testing import CliRunner

from keylane.commandline.command import Globals, JsonOption, Run, ServerOption, add_command, main, new_app
from keylane.commandline.output import CommandError, Output, UsageError
from keylane.commandline.typed import parse_pair, parse_time
from keylane.commandline.words import count_of
from keylane.connect.seeds import DEFAULT_SERVER
from keylane.errors import Overloaded, TopicNotFound


class Puzzled(Exception):
    """An error of a library that the command can explain."""


class Explaining(Run):
    """A run of a command that knows a library."""

    def explain(self, error: Exception) -> CommandError | None:
        """Explain what is known."""
        return CommandError("it was puzzled", status=3) if isinstance(error, Puzzled) else None


def raising(error: BaseException) -> Callable[[], object]:
    """An action that fails."""

    def action() -> object:
        raise error

    return action


def test_the_client_does_not_import_the_command_line() -> None:
    """Whoever only publishes does not wait for typer and rich."""
    code = "import sys, keylane; sys.exit(any(name in sys.modules for name in ('typer', 'rich')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (TopicNotFound("no topic 'x'"), 1, "error: no topic 'x'\n"),
        (CommandError("it is broken", status=3), 3, "error: it is broken\n"),
        (UsageError("--x is nonsense"), 2, "error: --x is nonsense\n"),
        (Puzzled(), 3, "error: it was puzzled\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_an_error_is_a_line_and_a_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has to read a traceback, but of a bug."""
    assert Explaining().execute(raising(error)) == status
    assert capsys.readouterr().err == said


def test_a_bug_is_not_hidden() -> None:
    """It comes with its traceback."""
    with pytest.raises(ZeroDivisionError):
        Explaining().execute(raising(ZeroDivisionError()))


def test_with_json_an_error_has_a_code_and_says_whether_to_try_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same for errors of the broker and for those of the command."""
    assert Run(json=True).execute(raising(Overloaded("later"))) == 1
    found = json.loads(capsys.readouterr().err)
    assert found == {"error": {"code": "overloaded", "message": "later", "retriable": True}}
    assert Run(json=True).execute(raising(UsageError("what?"))) == 2
    found = json.loads(capsys.readouterr().err)
    assert found == {"error": {"code": "usage", "message": "what?", "retriable": False}}


def test_the_server_is_the_one_given_else_that_of_the_environment_else_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a command can tell whether anybody has named one."""
    monkeypatch.setenv("KEYLANE_SERVER", "keylane://b")
    assert (Run("keylane://a").server, Run().server, Run().named_server) == (
        *("keylane://a", "keylane://b", "keylane://b"),
    )
    monkeypatch.delenv("KEYLANE_SERVER")
    assert (Run().server, Run().named_server) == (DEFAULT_SERVER, None)


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A key may look like markup or an emoji."""
    Output(json=False).say({}, "key [red]:heart:[/red]")
    assert capsys.readouterr().out == "key [red]:heart:[/red]\n"


def test_a_time_in_a_table_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    Output(False).table([], ["since"], [(datetime(2026, 11, 18, 6, 38, 24, 650_000, tzinfo=UTC),)])
    assert "2026-11-18 06:38:24Z" in capsys.readouterr().out


def test_options_count_before_and_behind_a_command() -> None:
    """`keylane --json topic list` is `keylane topic list --json`."""
    seen: list[tuple[str, bool]] = []

    def show(run: Run) -> None:
        seen.append((run.server, run.json))

    app = new_app("A test.")
    app.callback()(_before)
    add_command(app, "show", Run, show)
    options = ["--server", "keylane://a", "--json"]
    for words in (["show", *options], [*options, "show"], ["--json", "show", "--server", "keylane://a"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [("keylane://a", True)] * 3


def _before(ctx: typer.Context, server: ServerOption = None, json: JsonOption = False) -> None:
    ctx.obj = Globals(server, json)


def test_what_the_command_line_cannot_understand_is_json_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For programs that type."""
    app: typer.Typer = new_app("A test.")
    add_command(app, "show", Run, lambda run: None)
    with pytest.raises(SystemExit) as ended:
        main(app, "test", ["--json", "--nonsense"])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "usage"


def test_control_c_while_the_commands_are_put_together_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which takes its time where there are many."""

    def interrupted(_: typer.Typer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(new_app("A test."), "test", [])
    assert ended.value.code == 130


def test_what_people_type_is_checked() -> None:
    """The error names the option."""
    assert parse_pair("a=b=c", "--conf") == ("a", "b=c")
    for text in ("a", "=b", ""):
        with pytest.raises(UsageError, match=r"--conf .* is not of the form NAME=VALUE"):
            parse_pair(text, "--conf")
    with pytest.raises(UsageError, match=r"^--since 'noon' is not a time; write it as 2026-12-31T23:59:00Z$"):
        parse_time("noon", "--since")


def test_numbers_of_things_are_written_as_people_do() -> None:
    """One of them has no s."""
    assert [count_of(number, "batch") for number in (0, 1, 2_000)] == [
        "0 batches",
        "1 batch",
        "2,000 batches",
    ]
