"""The commands of `keylane`, as people and scripts run them, against a real broker."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

import pytest
from redis import Redis

from keylane import AsyncClient, Client, OutgoingMessage, __version__, wire
from keylane_broker.ports import free_port
from keylane_broker.store.keys import partition_keys
from tests.support import commands
from tests.support.commands import DEADLINE, KEYLANE, plain_signals
from tests.support.running import RunningBroker
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.slow  # each command is a process

Keylane = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """One of our own: doctor looks at all topics, and other tests leave some that are broken on purpose."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
def keylane(broker: RunningBroker) -> Keylane:
    """Runs a command on the broker to its end; `status` is what it should exit with."""
    return lambda *arguments, **more: commands.keylane(*arguments, **{"KEYLANE_SERVER": broker.url, **more})


@pytest.fixture
def client(broker: RunningBroker, topic: str) -> Any:
    """A client of the broker, on which the topic is."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=2)
        yield client
        client.delete_topic(topic)


# Topics


def test_a_topic_is_made_listed_described_and_deleted(keylane: Keylane, topic: str) -> None:
    """In words and tables."""
    made = keylane("topic", "create", topic, "--partitions", "3", "--dedupe-window", "3600")
    assert made.stdout == f"topic {topic!r} has 3 partitions\n"
    assert topic in keylane("topic", "list").stdout
    described = keylane("topic", "describe", topic).stdout
    assert "partitions" in described
    assert "3600" in described
    assert keylane("topic", "delete", topic).stdout == f"topic {topic!r} is deleted\n"
    assert topic not in keylane("topic", "list").stdout


def test_topics_as_json(keylane: Keylane, topic: str) -> None:
    """One document, with --json before or after the command."""
    made = json.loads(keylane("topic", "create", topic, "--json").stdout)
    assert (made["name"], made["partitions"]) == (topic, 8)
    listed = json.loads(keylane("--json", "topic", "list").stdout)
    assert [item["partitions"] for item in listed if item["name"] == topic] == [8]
    described = json.loads(keylane("topic", "describe", topic, "--json").stdout)
    assert (described["name"], described["partitions"], described["subscriptions"]) == (topic, 8, [])
    assert json.loads(keylane("topic", "delete", topic, "--json").stdout) == {"name": topic, "deleted": True}


def test_the_journal_of_a_topic_is_switched_on_and_off(keylane: Keylane, topic: str) -> None:
    """When it is made, and later; with so many records or as many as is usual."""
    made = json.loads(keylane("topic", "create", topic, "--journal", "on", "--json").stdout)
    assert made["journal"] == 100_000
    assert (
        keylane("topic", "change", topic, "--journal", "off").stdout
        == f"the journal of topic {topic!r} is off\n"
    )
    changed = keylane("topic", "change", topic, "--journal", "5000").stdout
    assert changed == f"the journal of topic {topic!r} keeps 5,000 records in each partition\n"
    assert "5,000" in keylane("topic", "describe", topic).stdout
    assert (
        "is not on, off or a number" in keylane("topic", "change", topic, "--journal", "-1x", status=2).stderr
    )
    assert "nothing to change" in keylane("topic", "change", topic, status=2).stderr
    said = keylane("topic", "change", topic, "--dedupe-window", "90").stdout
    assert said == f"topic {topic!r} knows uids for 90 s\n"
    assert json.loads(keylane("topic", "describe", topic, "--json").stdout)["dedupe_window"] == 90
    keylane("topic", "delete", topic)


def test_a_topic_that_exists_is_an_error_unless_that_is_fine(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """With the error's code in JSON."""
    error = json.loads(keylane("topic", "create", topic, "--json", status=1).stderr)["error"]
    assert (error["code"], error["retriable"]) == ("topic_exists", False)
    keylane("topic", "create", topic, "--exist-ok")


def test_an_unknown_topic_is_one_line_that_suggests_the_nearest(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """The same whichever command finds out."""
    wrong = topic[:-1]
    expected = f"error: no topic {wrong!r}; did you mean {topic!r}?\n"
    assert keylane("topic", "describe", wrong, status=1).stderr == expected
    assert keylane("publish", wrong, "hello", status=1).stderr == expected
    error = json.loads(keylane("publish", wrong, "hello", "--json", status=1).stderr)["error"]
    assert error == {
        "code": "topic_not_found",
        "message": expected.removeprefix("error: ").strip(),
        "retriable": False,
    }


# Publishing


def test_publish_says_what_became_of_the_message(keylane: Keylane, client: Client, topic: str) -> None:
    """Its id; and on what topic nobody listens."""
    assert (
        "has no subscription that wants it, so nothing was stored"
        in keylane("publish", topic, "hello").stdout
    )
    client.create_subscription(topic, "billing")
    arguments = ["publish", topic, "héllo", "--key", "k", "--attr", "a=1", "--attr", "b=x=y", "--uid", "u1"]
    first = json.loads(keylane(*arguments, "--json").stdout)
    assert (first["uid"], first["duplicate"], first["no_subscribers"]) == ("u1", False, False)
    assert f"published {first['id']}, which was published already" in keylane(*arguments).stdout
    with client.subscribe(topic, "billing") as consumer:
        message = consumer.receive(timeout=DEADLINE)
        assert (message.id, message.key, message.data()) == (first["id"], "k", "héllo".encode())
        assert message.attributes == {"a": "1", "b": "x=y"}
        message.ack()


def test_publish_reads_a_body_from_stdin_and_names_a_partition(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """Any bytes."""
    client.create_subscription(topic, "billing")
    arguments = ["publish", topic, "-", "--partition", "1", "--durability", "memory", "--json"]
    published = json.loads(keylane(*arguments, input=b"\xff\x00").stdout)
    assert (published["partition"], published["durability"]) == (1, "memory")
    line = keylane("subscribe", topic, "billing", "--max", "1", "--json").stdout
    assert json.loads(line)["data_base64"] == "/wA="


def test_publish_for_later(keylane: Keylane, client: Client, topic: str) -> None:
    """It says so, and the message comes in its time."""
    client.create_subscription(topic, "billing")
    said = keylane("publish", topic, "tea", "--delay", "0.3", "--uid", "u").stdout
    assert said == "stored until it is due (uid u, memory)\n"
    assert json.loads(keylane("publish", topic, "tea", "--delay", "60", "--json").stdout)["delayed"]
    assert "tea" in keylane("subscribe", topic, "billing", "--max", "1").stdout


def test_publish_many_says_how_fast(keylane: Keylane, client: Client, topic: str) -> None:
    """In batches; no progress bar where there is no terminal."""
    client.create_subscription(topic, "billing")
    done = keylane("publish", topic, "hello", "--count", "2500", "--json")
    document = json.loads(done.stdout)
    assert (document["published"], document["no_subscribers"], done.stderr) == (2500, 0, "")
    assert client.describe_subscription(topic, "billing").backlog == 2500
    assert "published 10 messages in" in keylane("publish", topic, "hello", "--count", "10").stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--attr", "novalue"], "error: --attr 'novalue' is not of the form NAME=VALUE"),
        (["--uid", "u", "--count", "2"], "error: --uid is the id of one message"),
        (["--count", "0"], "--count"),
        (["--partition", "x"], "--partition"),
    ],
)
def test_publish_refuses_what_cannot_be_meant(keylane: Keylane, arguments: list[str], text: str) -> None:
    """With exit code 2, before it talks to anybody."""
    assert text in keylane("publish", "t", "body", *arguments, status=2).stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--mode", ["subscribe", "t", "s", "--max", "1"]),
        ("--mode", ["subscription", "create", "t", "s"]),
        ("--delivery", ["subscription", "create", "t", "s"]),
        ("--poison", ["subscription", "create", "t", "s"]),
        ("--poison", ["subscription", "change", "t", "s"]),
    ],
)
def test_a_word_that_there_is_not_is_a_mistake_in_the_command(
    keylane: Keylane, option: str, words: list[str]
) -> None:
    """With exit code 2, whether or not there is such a topic."""
    assert "'sideways' is not one of" in " ".join(
        keylane(*words, option, "sideways", status=2).stderr.split()
    )


def test_publish_passes_on_what_the_broker_refuses(keylane: Keylane, client: Client, topic: str) -> None:
    """With exit code 1 and the code of the error."""
    done = keylane("publish", topic, "hello", "--partition", "7", "--json", status=1)
    assert json.loads(done.stderr)["error"]["code"] in ("invalid_argument", "topic_not_found")
    done = keylane("publish", topic, "hello", "--durability", "eternal", "--json", status=1)
    assert json.loads(done.stderr)["error"]["code"] == "invalid_argument"


# Subscribing


def test_subscribe_prints_and_acks_what_it_gets(keylane: Keylane, client: Client, topic: str) -> None:
    """As lines for people, and as JSON with everything there is to know."""
    client.create_subscription(topic, "billing", mode="key_shared")
    published = [client.publish(topic, f"tea {n}", key="k", attributes={"n": str(n)}) for n in range(3)]
    assert (
        keylane("subscribe", topic, "billing", "--max", "1").stdout == f"{published[0].id}  k  tea 0  n=0\n"
    )
    lines = keylane("subscribe", topic, "billing", "--max", "2", "--json").stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    assert [(message["id"], message["data"]) for message in messages] == [
        (published[1].id, "tea 1"),
        (published[2].id, "tea 2"),
    ]
    assert messages[0]["attributes"] == {"n": "1"}
    assert (messages[0]["retry_count"], messages[0]["topic"], messages[0]["key"]) == (0, topic, "k")
    assert messages[0]["age"] >= 0
    assert client.describe_subscription(topic, "billing").backlog == 0


def test_subscribe_makes_the_subscription_where_the_offset_says(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """And says so when it is too late for that."""
    client.create_subscription(topic, "keeper")
    ids = [client.publish(topic, f"tea {n}", partition=1).id for n in range(3)]
    assert ids[1] is not None
    done = keylane("subscribe", topic, "early", "--offset", "earliest", "--max", "3", "--json")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ids
    arguments = ["--partition", "1", "--offset", ids[1], "--max", "2", "--json"]
    done = keylane("subscribe", topic, "from-there", *arguments)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ids[1:]
    client.publish(topic, "late")
    done = keylane("subscribe", topic, "early", "--offset", "earliest", "--max", "1")
    assert "late" in done.stdout
    assert f"keylane subscription seek {topic} early earliest" in done.stderr


def test_subscribe_without_ack_gives_everything_back(keylane: Keylane, client: Client, topic: str) -> None:
    """Uncharged."""
    client.create_subscription(topic, "billing")
    client.publish(topic, "tea")
    for _ in range(2):
        line = keylane("subscribe", topic, "billing", "--max", "1", "--no-ack", "--json").stdout
        assert json.loads(line)["retry_count"] == 0
    assert client.describe_subscription(topic, "billing").backlog == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_subscribe_in_good_order(
    broker: RunningBroker, client: Client, topic: str, how: signal.Signals
) -> None:
    """With exit code 0; what it printed is acked, and nobody waits for a session to expire."""
    client.create_subscription(topic, "billing")
    command = [KEYLANE, "subscribe", topic, "billing", "--server", broker.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=plain_signals) as process:
        client.publish(topic, "tea")
        assert process.stdout is not None
        assert "tea" in process.stdout.readline()
        process.send_signal(how)
        _, errors = process.communicate(timeout=DEADLINE)
        assert (process.returncode, errors) == (0, "")
    about = client.describe_subscription(topic, "billing")
    assert (about.backlog, about.consumers) == (0, [])


def test_subscribe_refuses_another_mode_than_the_stored_one(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """With the broker's word for it."""
    client.create_subscription(topic, "billing", mode="shared")
    done = keylane("subscribe", topic, "billing", "--mode", "exclusive", "--json", status=1)
    assert json.loads(done.stderr)["error"]["code"] == "subscription_exists"


def test_a_position_that_is_none_is_a_usage_error(keylane: Keylane, client: Client, topic: str) -> None:
    """It says which there are."""
    done = keylane("subscribe", topic, "billing", "--offset", "yesterday", status=2)
    assert "error: 'yesterday' is not a position" in done.stderr
    keylane("subscription", "seek", topic, "billing", "yesterday", status=2)


# Subscriptions


def test_a_subscription_is_made_listed_described_paused_and_deleted(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """In words, tables and JSON."""
    keylane("subscription", "create", topic, "billing", "--mode", "key_shared", "--lease", "5")
    table = keylane("subscription", "list", topic).stdout
    assert "billing" in table
    assert "key_shared" in table
    about = json.loads(keylane("subscription", "describe", topic, "billing", "--json").stdout)
    assert (about["name"], about["mode"], about["lease"]) == ("billing", "key_shared", 5.0)
    keylane("subscription", "pause", topic, "billing")
    assert json.loads(keylane("subscription", "list", topic, "--json").stdout)[0]["paused"] is True
    keylane("subscription", "resume", topic, "billing")
    assert client.describe_subscription(topic, "billing").paused is False
    keylane("subscription", "delete", topic, "billing")
    assert keylane("subscription", "list", topic, "--json").stdout == "[]\n"


def test_a_subscription_that_is_read_by_position_is_shown_with_its_reader(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """And is neither paused nor consumed."""
    made = keylane("subscription", "create", topic, "spark", "--mode", "cursor")
    assert made.stdout == f"subscription 'spark' on {topic!r} is cursor\n"
    client.publish_many(topic, [OutgoingMessage(partition=0) for _ in range(3)])
    assert client.claim(topic, "spark", "query-1", session=60).granted
    client.commit(topic, "spark", "query-1", {0: 2})
    assert "cursor" in keylane("subscription", "list", topic).stdout
    about = json.loads(keylane("subscription", "describe", topic, "spark", "--json").stdout)
    assert (about["mode"], about["backlog"], about["consumers"]) == ("cursor", 2, ["query-1"])
    refused = keylane("subscription", "pause", topic, "spark", status=1)
    assert "stop its reader instead" in refused.stderr
    refused = keylane("subscribe", topic, "spark", "--max", "1", status=1)
    assert "use another subscription" in refused.stderr


def test_seek_moves_a_subscription(keylane: Keylane, client: Client, topic: str) -> None:
    """Back, forward, to an id and to a time."""
    client.create_subscription(topic, "keeper")
    client.create_subscription(topic, "billing")
    ids = [client.publish(topic, f"tea {n}", partition=0).id for n in range(3)]
    assert ids[1] is not None
    for position, backlog in [
        ("latest", 0),
        ("earliest", 3),
        (ids[1], 2),
        ("2020-01-01", 3),
        ("2100-01-01", 0),
    ]:
        keylane("subscription", "seek", topic, "billing", position)
        assert client.describe_subscription(topic, "billing").backlog == backlog, position


def test_an_unknown_subscription_suggests_the_nearest(keylane: Keylane, client: Client, topic: str) -> None:
    """As for topics."""
    client.create_subscription(topic, "billing")
    done = keylane("subscription", "describe", topic, "biling", status=1)
    assert done.stderr == f"error: no subscription 'biling' on {topic!r}; did you mean 'billing'?\n"


async def test_peek_shows_what_is_not_settled_without_taking_it(
    keylane: Keylane, broker: RunningBroker, client: Client, topic: str
) -> None:
    """Fresh, and leased to somebody."""
    client.create_subscription(topic, "billing")
    published = client.publish(topic, "tea", key="k", partition=1)
    [message] = json.loads(keylane("peek", topic, "billing", "--json").stdout)
    assert (message["id"], message["key"], message["state"]) == (published.id, "k", "fresh")
    assert json.loads(keylane("peek", topic, "billing", "--partition", "0", "--json").stdout) == []
    async with (
        AsyncClient(broker.url) as other,
        other.subscribe(topic, "billing", name="anna") as consumer,
    ):
        await consumer.receive(timeout=DEADLINE)
        assert "leased to anna" in keylane("peek", topic, "billing", "--max", "5").stdout


# Everything


def test_tables_fit_into_eighty_columns_and_have_no_colours(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """Where that is how wide a terminal is said to be, and nobody says how colourful it is."""
    for name in ("billing", "a-subscription-with-quite-a-long-name-that-goes-on-and-on"):
        client.create_subscription(topic, name, mode="key_shared")
    client.publish(topic, "tea", key="a-key-" + 20 * "long-")
    for arguments in (
        ["topic", "list"],
        ["topic", "describe", topic],
        ["subscription", "list", topic],
        ["subscription", "describe", topic, "billing"],
        ["peek", topic, "billing"],
        ["doctor"],
    ):
        text = keylane(*arguments, COLUMNS="80").stdout
        assert "\x1b" not in text
        assert max(len(line) for line in text.splitlines()) <= 80, text


def test_colours_are_for_terminals_and_those_who_want_them(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """NO_COLOR is heard."""
    client.create_subscription(topic, "billing")
    client.publish(topic, "tea", key="k")
    command = [KEYLANE, "subscribe", topic, "billing", "--max", "1", "--no-ack", "--server", broker.url]
    cyan = b"\x1b[36m"
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    assert cyan in _on_a_terminal(command, plain)
    assert cyan not in _on_a_terminal(command, {**plain, "NO_COLOR": "1"})


def _on_a_terminal(command: list[str], environment: dict[str, str]) -> bytes:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(theirs, "wb") as terminal:
        done = subprocess.run(command, stdout=terminal, env=environment, timeout=DEADLINE)
        assert done.returncode == 0
        return screen.read(4096)


@pytest.mark.parametrize(
    "arguments",
    [["topic", "list"], ["publish", "t", "hello"], ["subscribe", "t", "s"], ["doctor"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_without_a_broker_every_command_says_how_to_start_one(keylane: Keylane, arguments: list[str]) -> None:
    """With exit code 1 and no traceback."""
    done = keylane(*arguments, "--server", f"keylane://127.0.0.1:{free_port()}", status=1)
    assert "keylane serve" in done.stdout + done.stderr


def test_the_server_can_be_named_before_and_after_the_command(
    keylane: Keylane, broker: RunningBroker
) -> None:
    """And either wins over the environment."""
    nowhere = f"keylane://127.0.0.1:{free_port()}"
    keylane("--server", broker.url, "topic", "list", KEYLANE_SERVER=nowhere)
    keylane("topic", "list", "--server", broker.url, KEYLANE_SERVER=nowhere)
    keylane("--server", nowhere, "topic", "list", "--server", broker.url)
    assert "http://x" in keylane("topic", "list", "--server", "http://x", status=1).stderr


def test_unknown_commands_and_options_are_usage_errors(keylane: Keylane) -> None:
    """With exit code 2."""
    keylane("topics", status=2)
    keylane("topic", "list", "--frobnicate", status=2)
    keylane("publish", "only-a-topic", status=2)
    error = json.loads(keylane("publish", "only-a-topic", "--json", status=2).stderr)["error"]
    assert (error["code"], error["retriable"]) == ("usage", False)
    assert "BODY" in error["message"]


def test_help_needs_none_of_the_slow_modules(keylane: Keylane) -> None:
    """Typing should not have to wait for what it does not use."""
    slow = ("redis", "pydantic", "fsspec", "uvloop", "keylane.async_client", "anyio")
    main = "keylane_broker.commandline.main"
    script = f"import sys, {main}; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == "[]\n"
    assert "subscribe" in keylane("--help").stdout


def test_help_shows_defaults_and_what_is_possible(keylane: Keylane) -> None:
    """And breaks no sentence where the source does."""
    serve, subscribe = (
        " ".join(keylane(name, "--help", COLUMNS="400").stdout.split()) for name in ("serve", "subscribe")
    )
    assert "SIGHUP restarts the workers one by one" in serve
    assert "[default: (9999)]" in serve
    assert "Maximum size of a frame. [default: (16MiB)]" in serve
    assert "Broker URL; by default $KEYLANE_SERVER, else port 9999 of this machine." in subscribe
    assert "cursor" not in subscribe


def test_help_is_whole_in_a_narrow_terminal(keylane: Keylane) -> None:
    """Nothing is cut off, nor taken for markup."""
    for command in ("topic create", "subscription create", "subscribe"):
        assert "…" not in keylane(*command.split(), "--help", COLUMNS="80").stdout.replace("[,…]", "")
    assert "[a-z]" in keylane("subscription", "create", "--help", COLUMNS="400").stdout


def test_the_version_is_told(keylane: Keylane) -> None:
    assert keylane("--version").stdout == f"keylane {__version__}\n"
    for words in (["--version", "--json"], ["--json", "--version"]):
        assert json.loads(keylane(*words).stdout) == {"version": __version__}
    assert __version__ == version("keylane")


def test_a_worker_that_is_started_by_hand_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "keylane_broker.process", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (1, "workers take no arguments: `keylane serve` starts them\n")


# Tokens


@pytest.mark.parametrize(
    "command",
    [
        ["topic", "list"],
        ["publish", "t", "hello"],
        ["subscribe", "t", "s"],
        ["peek", "t", "s"],
        ["cluster"],
        ["rebalance"],
        ["demo"],
        ["subscription", "list", "t"],
    ],
)
async def test_every_command_sends_the_token_of_the_environment(command: list[str]) -> None:
    """And takes the broker's no for an answer."""
    async with ScriptedWorker() as worker:
        worker.refusal = wire.Error("unauthorized", "no such token")
        environment: Any = {"KEYLANE_SERVER": worker.url, "KEYLANE_TOKEN": "mine"}
        done = await asyncio.to_thread(commands.keylane, *command, status=1, **environment)
        assert done.stderr == "error: no such token\n"
        assert worker.tokens == {"mine"}


# Times


def test_a_time_without_a_zone_is_utc_wherever_the_machine_is(
    keylane: Keylane, client: Client, topic: str
) -> None:
    """In New York the same words would be a time to come."""
    client.create_subscription(topic, "keeps")
    client.publish(topic, b"tea")
    before = (datetime.now(UTC) - timedelta(minutes=1)).replace(tzinfo=None).isoformat()
    new_york = {"TZ": "America/New_York"}
    keylane("subscription", "create", topic, "made", "--start", before, **new_york)
    keylane("subscription", "create", topic, "moved", **new_york)
    keylane("subscription", "seek", topic, "moved", before, **new_york)
    for name in ("made", "moved"):
        assert client.describe_subscription(topic, name).backlog == 1
    arguments = ["subscribe", topic, "read", "--offset", before, "--max", "1"]
    assert "tea" in keylane(*arguments, **new_york).stdout
    keylane("publish", topic, "now", "--deliver-at", before, **new_york)
    assert "now" in keylane("subscribe", topic, "made", "--max", "2", **new_york).stdout


@pytest.mark.parametrize(
    "command",
    [
        ["subscribe"],
        ["subscription", "create"],
        ["subscription", "seek"],
        ["publish"],
        ["pipeline", "replay"],
        ["pipeline", "audit"],
    ],
)
def test_every_command_that_takes_a_time_says_in_its_help_that_it_is_utc(
    keylane: Keylane, command: list[str]
) -> None:
    assert "UTC by default" in " ".join(keylane(*command, "--help", COLUMNS="400").stdout.split())


# Doctor


def test_doctor_finds_a_healthy_broker_healthy(
    keylane: Keylane, broker: RunningBroker, client: Client, topic: str
) -> None:
    """With its Redis looked into, topic by topic."""
    done = keylane("doctor", "--redis", broker.redis_url, "--json")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert all(finding["ok"] for finding in findings.values()), findings
    assert {
        "broker",
        "workers",
        "partitions",
        "round trip",
        "clocks",
        "payloads",
        "redis",
        "eviction",
    } <= findings.keys()
    assert f"topic {topic}" in findings


def test_doctor_tells_of_partitions_whose_time_is_ahead(
    broker: RunningBroker, keylane: Keylane, topic: str
) -> None:
    keylane("topic", "create", topic, "--partitions", "2")
    with Redis.from_url(broker.redis_url) as redis:
        redis.hset(partition_keys(topic, 1).meta, "lead", "7200000")
    shown = json.loads(keylane("doctor", "--redis", broker.redis_url, "--json").stdout)
    [clocks] = [item for item in shown if item["check"] == "partition clocks"]
    assert clocks["warns"]
    assert f"partition 1 of {topic}, by 7200.0 s" in clocks["detail"]
    assert "published_at" in keylane("doctor", "--redis", broker.redis_url).stdout
    keylane("topic", "delete", topic)


def test_doctor_tells_a_broker_without_redis_from_none(keylane: Keylane) -> None:
    """Starting workers would not help."""
    with RunningBroker() as alone:
        assert not isinstance(alone.server, str)
        alone.server.kill()
        shown = keylane("doctor", "--server", alone.url, status=1).stdout
        assert "Redis cannot be reached" in shown
        assert "bring Redis back" in shown
        assert "Redis cannot be reached" in keylane("cluster", "--server", alone.url, status=1).stderr
        alone.server.start()
        keylane("doctor", "--server", alone.url)


async def test_doctor_blames_redis_only_where_it_is_away() -> None:
    async with ScriptedWorker() as worker:
        worker.refusal = wire.Error("unavailable", "the worker is stopping")
        done = await asyncio.to_thread(commands.keylane, "doctor", "--server", worker.url, status=1)
    assert "the worker is stopping" in done.stdout
    assert "bring Redis back" not in done.stdout
    assert "the workers' logs" in done.stdout


async def test_doctor_says_that_a_disk_is_full() -> None:
    """Redis is there, so nobody can bring it back."""
    async with ScriptedWorker() as worker:
        full = "MISCONF Errors writing to the AOF file: No space left on device"
        worker.refusal = wire.Error("unavailable", f"Redis refuses commands for now: {full}")
        done = await asyncio.to_thread(commands.keylane, "doctor", "--server", worker.url, status=1)
    assert "free space on the disk of Redis" in done.stdout


def test_doctor_says_what_is_wrong_and_what_to_do(
    keylane: Keylane, broker: RunningBroker, server_url: str
) -> None:
    """A Redis without persistence and a broker that is not there."""
    done = keylane(
        "doctor", "--redis", server_url, "--server", f"keylane://127.0.0.1:{free_port()}", status=1
    )
    assert "keylane serve" in done.stdout
    assert "CONFIG SET appendonly yes" in done.stdout
    assert "checks found something wrong" in done.stderr
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    findings = json.loads(keylane("doctor", "--redis", nowhere, "--json", status=1).stdout)
    assert [finding["check"] for finding in findings if not finding["ok"]] == ["redis"]
