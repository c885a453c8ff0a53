"""Commands where the terminal, a stream, the encoding or what was typed is a little wrong: no traceback."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keylane import Client
from tests.support.commands import DEADLINE, KEYLANE, keylane, plain_signals
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # each command is a process


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """One for all of these."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker, topic: str) -> Iterator[Client]:
    """A client of the broker, on which the topic is, with a subscription that is owed what no ASCII has."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "a")
        client.publish(topic, "naïve 🍏".encode(), key="ключ")
        yield client
        client.delete_topic(topic)


def at_a_terminal(broker: RunningBroker, *arguments: str, question: bytes) -> tuple[int, bytes]:
    """Run a command whose three streams are a terminal, and press Ctrl-C when it asks."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [KEYLANE, *arguments, "--server", broker.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=plain_signals,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        said = b""
        while question not in said:
            said += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        return process.wait(DEADLINE), said
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    "words",
    ["topic delete {}", "subscription delete {} a", "purge {}", "dlq purge {} --all", "delete-message {} ID"],
)
def test_control_c_is_an_answer_to_a_question(
    words: str, broker: RunningBroker, client: Client, topic: str
) -> None:
    """And the answer is no."""
    status, _ = at_a_terminal(broker, *words.format(topic).split(), question=b"[y/N]")
    assert status == 130
    assert client.describe_subscription(topic, "a").backlog == 1


def test_control_c_ends_the_wait_for_the_rest_of_a_body(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """And nothing is published."""
    process = subprocess.Popen(
        [KEYLANE, "publish", topic, "-", "--server", broker.url],
        stdin=subprocess.PIPE,
        preexec_fn=plain_signals,
    )
    assert process.stdin is not None
    try:
        os.write(process.stdin.fileno(), b"the beginning")
        while fcntl.ioctl(process.stdin, termios.FIONREAD, b"    ") != b"\0\0\0\0":
            time.sleep(0.01)  # until it has been read
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    assert client.describe_subscription(topic, "a").backlog == 1


def test_control_c_while_the_command_is_being_imported_is_no_traceback(tmp_path: Path) -> None:
    """Which is when people see that they have typed the wrong thing."""
    slow = tmp_path / "typer.py"  # stands for all that takes its time
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(1000)\n")
    process = subprocess.Popen(
        [KEYLANE, "topic", "list"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=plain_signals,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE)
    assert (process.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(
    "words", ["topic list", "topic describe {}", "peek {} a", "cluster --topic {}", "top --once"]
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_disk_that_is_full_is_said_to_be(
    words: str, options: list[str], broker: RunningBroker, client: Client, topic: str
) -> None:
    """Whether it is a table or JSON that cannot be written."""
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [KEYLANE, *words.format(topic).split(), *options, "--server", broker.url],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert b"cannot write to stdout: No space left on device" in said
    assert said.count(b"\n") == 1


@pytest.mark.parametrize(
    "words", ["topic list", "cluster --topic {}", "peek {} a", "top -i 0.1", "--help", "topic --help"]
)
def test_a_reader_that_has_gone_is_no_error(
    words: str, broker: RunningBroker, client: Client, topic: str
) -> None:
    """As in `keylane --help | true`, also where a shell looks at all statuses."""
    out, into = os.pipe()
    os.close(out)
    process = subprocess.Popen(
        [KEYLANE, *words.format(topic).split()],
        stdout=into,
        stderr=subprocess.PIPE,
        env={**os.environ, "KEYLANE_SERVER": broker.url},
    )
    os.close(into)
    _, said = process.communicate(timeout=DEADLINE)
    assert (process.returncode, said) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_terminal_cannot_show_is_shown_by_number(
    encoding: str, broker: RunningBroker, client: Client, topic: str
) -> None:
    """In JSON it is what JSON has for that, in errors as well."""

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [KEYLANE, *words],
            capture_output=True,
            encoding=encoding,
            env={**os.environ, "KEYLANE_SERVER": broker.url, "PYTHONIOENCODING": encoding},
            timeout=DEADLINE,
        )

    assert "\\U0001f34f" in typed("peek", topic, "a").stdout
    assert "\\u043a\\u043b\\u044e\\u0447" in typed("topic", "describe", topic).stdout
    assert json.loads(typed("peek", topic, "a", "--json").stdout)[0]["data"] == "naïve 🍏"
    error = json.loads(typed("topic", "describe", "🍏", "--json").stderr)["error"]
    assert "'🍏'" in error["message"]
    assert "\\U0001f34f" in typed("subscribe", topic, "a", "--max", "1").stdout
    assert client.describe_subscription(topic, "a").backlog == 0


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_closed_is_as_good_as_one_that_leads_nowhere(
    closed: int, broker: RunningBroker, client: Client, topic: str
) -> None:
    """As in `keylane … <&-`, which some launchers do."""
    done = subprocess.run(
        [
            *("/bin/sh", "-c", f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-', "sh"),
            *(KEYLANE, "publish", topic, "-", "--server", broker.url),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert client.describe_subscription(topic, "a").backlog == 2


@pytest.mark.parametrize(
    "words",
    [
        ["publish", "{}", b"\xff"],
        ["publish", b"\xff", "hello"],
        ["publish", "{}", "hello", "--key", b"\xff"],
        ["topic", "describe", b"\xff"],
    ],
)
def test_an_argument_that_is_no_text_is_a_usage_error(
    words: list[str | bytes], broker: RunningBroker, client: Client, topic: str
) -> None:
    """And bytes that are none can be published from stdin."""
    arguments = [word.format(topic) if isinstance(word, str) else word for word in words]
    for options in ([], ["--json"]):
        done = subprocess.run(
            [KEYLANE, *arguments, "--server", broker.url, *options], capture_output=True, timeout=DEADLINE
        )
        assert done.returncode == 2
        assert rb"\xff" in done.stderr
        assert done.stderr.count(b"\n") == 1
    keylane("publish", topic, "-", input=b"\xff", KEYLANE_SERVER=broker.url)


def test_a_terminal_that_does_not_know_its_width_shows_everything(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """As in a window of Emacs, or behind `docker exec`."""
    for words in (["topic", "list"], ["topic", "list", "--help"]):
        assert "topic" in keylane(*words, KEYLANE_SERVER=broker.url, COLUMNS="0").stdout


def test_a_group_without_a_command_is_json_where_that_was_asked_for() -> None:
    """Its help otherwise."""
    for words in (["--json"], ["--json", "topic"]):
        done = keylane(*words, status=2)
        assert (done.stdout, json.loads(done.stderr)["error"]["code"]) == ("", "usage")
        assert "Missing command" in json.loads(done.stderr)["error"]["message"]
    done = keylane("topic", status=2)
    assert "describe" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "topic creat x",
            "error: No such command 'creat'. Did you mean 'create'? See `keylane topic --help`\n",
        ),
        ("publish x", "error: Missing argument 'BODY'. See `keylane publish --help`\n"),
        (
            "publish x y --priority 10",
            "error: Invalid value for '--priority': Input should be less than or equal to 9. "
            "See `keylane publish --help`\n",
        ),
        (
            "subscribe x y --mode none",
            "error: Invalid value for '--mode': 'none' is not one of 'shared', 'key_shared', 'exclusive', "
            "'failover', 'multicast', 'cursor'. See `keylane subscribe --help`\n",
        ),
    ],
)
def test_what_cannot_be_understood_is_one_line(words: str, said: str) -> None:
    """That says where there is more."""
    assert keylane(*words.split(), status=2).stderr == said


def test_serve_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    """It keeps its data in the current one unless told otherwise."""
    process = subprocess.run(
        ["/bin/sh", "-c", f'cd {tmp_path} && rmdir {tmp_path} && exec "$0" serve --port 0', KEYLANE],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert process.returncode == 1
    assert "--data-dir" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_variable_that_is_nearly_a_setting_is_warned_of(tmp_path: Path) -> None:
    """It would be without effect, and nobody would know; others may be for somebody else."""
    variables = {"KEYLANE_WORKES": "2", "KEYLANE_SERVICE_HOST": "10.0.0.1", "KEYLANE_PORT_9999_TCP": "x"}
    process = subprocess.Popen(
        [KEYLANE, "serve", "--port", "0", "--data-dir", str(tmp_path)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=DEADLINE)
    assert [line for line in log.decode().splitlines() if "KEYLANE_" in line] == [
        next(line for line in log.decode().splitlines() if "KEYLANE_WORKES" in line)
    ]
    assert b"did you mean 'WORKERS'?" in log


def test_a_message_that_no_filter_lets_through_is_said_to_be_wanted_by_nobody(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """Though the topic has a subscription."""
    client.delete_subscription(topic, "a")
    client.create_subscription(topic, "b", filter={"region": "eu"})
    there: Any = {"KEYLANE_SERVER": broker.url}
    nobody = f"{topic!r} has no subscription that wants it, so nothing was stored"
    assert nobody in keylane("publish", topic, "hello", **there).stdout
    assert nobody in keylane("publish", topic, "hello", "--count", "3", **there).stdout
    assert (
        "stored" not in keylane("publish", topic, "x", "--attr", "region=eu", "--count", "3", **there).stdout
    )


def test_an_attribute_has_one_value(broker: RunningBroker, client: Client, topic: str) -> None:
    """Which of two would count nobody could know."""
    said = keylane("publish", topic, "x", "--attr", "a=1", "--attr", "a=2", status=2).stderr
    assert said == "error: --attr 'a' is given twice; an attribute has one value\n"


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_message_is_deleted_if_the_answer_is_yes(
    answer: str, broker: RunningBroker, client: Client, topic: str
) -> None:
    """As all that is gone for good; scripts are not asked."""
    [message] = client.peek(topic, "a")
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = subprocess.run(
        [KEYLANE, "delete-message", topic, message.id, "--server", broker.url],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    os.close(ours)
    os.close(theirs)
    assert f"Delete message {message.id} of {topic!r} for all subscriptions? [y/N]" in done.stderr
    assert (done.returncode, client.peek(topic, "a") == []) == ((0, True) if answer == "y" else (1, False))
