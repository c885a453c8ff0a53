"""What operators see: readiness, logs, `keylane top`, and questions before something is deleted."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator

import httpx
import pytest
import redis

from keylane import Client
from keylane_broker.ports import free_port
from tests.support.commands import DEADLINE, KEYLANE, ask_keylane, keylane
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

SOON = 60.0


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, log_format="json") as broker:
        yield broker


@pytest.fixture
def client(served: RunningBroker) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def readiness(broker: RunningBroker) -> int:
    return httpx.get(f"{broker.http_urls[0]}/readyz", timeout=SOON).status_code


@pytest.mark.slow
def test_a_worker_is_ready_only_while_redis_runs_scripts_for_it(topic: str) -> None:
    with RunningBroker(http=True, partition_lease=1.0) as broker:
        url = broker.http_urls[0]
        assert readiness(broker) == 200
        with Client(broker.url) as client:
            client.create_topic(topic, partitions=2)
        wait_until(lambda: readiness(broker) == 200)
        with redis.Redis.from_url(broker.redis_url) as connection:
            connection.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
            wait_until(lambda: readiness(broker) == 503)
            answer = httpx.get(f"{url}/readyz", timeout=SOON).json()
            assert answer["code"] == "unavailable"
            assert "Redis" in answer["detail"]
            assert httpx.get(f"{url}/healthz", timeout=SOON).status_code == 200
            connection.execute_command("ACL", "SETUSER", "default", "+evalsha", "+eval")
        wait_until(lambda: readiness(broker) == 200)


def test_every_line_of_a_json_log_is_an_object_and_unowed_topics_are_told_once(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=4)
    for number in range(8):
        assert client.publish(topic, b"", partition=number % 4).no_subscribers
    lines = [json.loads(line) for line in served.log().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    told = [line for line in lines if repr(topic) in line["message"] and "no subscription" in line["message"]]
    assert [(line["level"], line["process"]) for line in told] == [("info", "worker-0")]


def test_a_topic_without_subscriptions_is_told_of_once_by_all_workers_together(topic: str) -> None:
    with (
        RunningBroker(workers=2) as broker,
        Client(broker.url) as client,
        redis.Redis.from_url(broker.redis_url, decode_responses=True) as connection,
        connection.pubsub(ignore_subscribe_messages=True) as hints,
    ):
        client.create_topic(topic, partitions=2)
        hints.subscribe("kl:events")
        owners = {one.partition: one.worker for one in client.partitions(topic)}
        assert len(set(owners.values())) == 2
        client.publish(topic, b"", partition=0)
        wait_until(lambda: (said := hints.get_message()) and said["data"] == f"unowed {topic}")
        client.publish(topic, b"", partition=1)
        [told] = [line for line in broker.log().splitlines() if "no subscription" in line]
        assert owners[0] in told


@pytest.mark.slow
def test_top_shows_topics_and_workers(served: RunningBroker, client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=2)
    client.create_subscription(topic, "billing")
    client.publish(topic, b"")
    found = ask_keylane(served, "top", "--once", "--interval", "0.1", "--max", "1000", "--json")
    [about] = [one for one in found["topics"] if one["name"] == topic]
    assert (about["partitions"], about["subscriptions"][0]["backlog"]) == (2, 1)
    assert [worker["id"] for worker in found["cluster"]["workers"]] == ["worker-0"]
    arguments = ("top", "--once", "--interval", "0.1", "--max", "1000")
    text = keylane(*arguments, KEYLANE_SERVER=served.url, COLUMNS="200").stdout
    assert "billing" in text
    assert "worker-0 *" in text
    assert (
        "no broker"
        in keylane("top", "--once", status=1, KEYLANE_SERVER=f"keylane://127.0.0.1:{free_port()}").stderr
    )


def at_a_terminal(broker: RunningBroker, typed: str, *arguments: str) -> tuple[int, str]:
    """The status of a command, and what it says to somebody who types."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{typed}\n".encode())
        done = subprocess.run(
            [KEYLANE, *arguments],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env={**os.environ, "KEYLANE_SERVER": broker.url},
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_what_is_deleted_at_a_terminal_is_asked_for_first(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s")
    client.publish(topic, b"")
    status, said = at_a_terminal(served, "n", "subscription", "delete", topic, "s")
    assert (status, said.splitlines()[-1]) == (1, "error: cancelled: nothing was done")
    assert "which is owed 1? [y/N]" in said
    assert at_a_terminal(served, "", "topic", "delete", topic)[0] == 1
    assert client.describe_topic(topic).subscriptions == ["s"]
    assert at_a_terminal(served, "no", "dlq", "purge", topic, "--all")[0] == 1
    assert at_a_terminal(served, "y", "subscription", "delete", topic, "s")[0] == 0
    assert at_a_terminal(served, "", "topic", "delete", topic, "--yes") == (0, "")
    assert topic not in client.topics()


@pytest.mark.slow
def test_shells_complete_commands_and_settings() -> None:
    def complete(words: str, at: int) -> list[str]:
        variables = {"_KEYLANE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        done = subprocess.run(
            [KEYLANE], capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **variables}
        )
        return done.stdout.split()

    assert "create" in complete("keylane topic ", 2)
    assert complete("keylane serve --log", 2) == ["--log-level", "--log-format"]
