"""`keylane subscribe` with many messages: what was printed is acked, whatever ends it; the rest goes back."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from keylane import Client, OutgoingMessage
from keylane.payloads import open_store
from tests.support.commands import DEADLINE, KEYLANE, plain_signals
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # each command is a process

MANY = 6_000  # lines of them are more than a pipe takes at once


@pytest.fixture
def client(broker: RunningBroker, topic: str) -> Iterator[Client]:
    """A client; the topic is there, with a subscription."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "billing")
        yield client
        client.delete_topic(topic)


def publish(client: Client, topic: str, count: int) -> list[str]:
    """Publish so many, and return their ids in order."""
    bodies = [OutgoingMessage(b"tea %d" % number, key="anna") for number in range(count)]
    return [str(published.id) for published in client.publish_many(topic, bodies)]


def start(broker: RunningBroker, topic: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [KEYLANE, "subscribe", topic, "billing", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KEYLANE_SERVER": broker.url},
        preexec_fn=plain_signals,
    )


def left(client: Client, topic: str) -> list[str]:
    """What is still owed, in publish order; nobody holds any of it, and nothing was charged."""
    about = client.describe_subscription(topic, "billing")
    assert (about.consumers, about.leased) == ([], 0)
    ids = []
    with client.subscribe(topic, "billing", permits=10_000) as consumer:
        for _ in range(about.backlog):
            message = consumer.receive(timeout=DEADLINE)
            assert message.retry_count == 0
            ids.append(message.id)
    return sorted(ids, key=lambda id: int(id.rpartition("-")[2]))


@pytest.mark.parametrize("how", [(), ("--json",)], ids=["text", "json"])
def test_so_many_as_were_asked_for_are_printed_in_order_and_acked(
    broker: RunningBroker, client: Client, topic: str, how: tuple[str, ...]
) -> None:
    ids = publish(client, topic, MANY)
    with start(broker, topic, "--max", "5500", *how) as process:
        out, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, "")
    lines = out.splitlines()
    if how:
        assert [json.loads(line)["id"] for line in lines] == ids[:5500]
    else:
        assert lines == [f"{id}  anna  tea {number}" for number, id in enumerate(ids[:5500])]
    assert left(client, topic) == ids[5500:]


def test_control_c_in_the_middle_acks_what_was_printed_and_gives_back_the_rest(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """It is in the middle of writing when the signal comes, since nobody reads on."""
    ids = publish(client, topic, MANY)
    with start(broker, topic, "--json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert (process.wait(DEADLINE), errors) == (0, "")
    printed = [json.loads(line)["id"] for line in [first, *rest.splitlines()]]
    assert printed + left(client, topic) == ids


@pytest.mark.parametrize("how", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_has_had_enough_ends_it_quietly_and_the_rest_goes_back(
    broker: RunningBroker, client: Client, topic: str, how: tuple[str, ...]
) -> None:
    """As with `| head -n 1`; what fits into the pipe counts as read."""
    ids = publish(client, topic, MANY)
    with start(broker, topic, *how) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert ids[0] in process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(DEADLINE), errors) == (0, "")
    rest = left(client, topic)
    assert 0 < len(rest) < MANY
    assert rest == ids[-len(rest) :]


def test_what_could_not_be_printed_is_not_acked(broker: RunningBroker, client: Client, topic: str) -> None:
    """As on a disk without space."""
    ids = publish(client, topic, 100)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [KEYLANE, "subscribe", topic, "billing", "--server", broker.url],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"
    assert left(client, topic) == ids


def test_a_body_that_is_gone_is_told_its_message_goes_back_and_the_others_are_printed_and_acked(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    lost = client.publish(topic, b"lost")
    asyncio.run(delete_body(broker.redis_url, topic, lost.uid))
    client.publish_many(topic, [OutgoingMessage(b"found")] * 3)
    with start(broker, topic, "--max", "4") as process:
        out, errors = process.communicate(timeout=DEADLINE)
    assert [line.split("  ")[2] for line in out.splitlines()] == ["(body is gone)", *["found"] * 3]
    assert errors.startswith("warning: ")
    assert "keylane skip" in errors
    assert left(client, topic) == [lost.id]


def test_text_of_several_lines_is_printed_as_it_is(broker: RunningBroker, client: Client, topic: str) -> None:
    client.publish(topic, "one\ntwo")
    client.publish(topic, "three")
    with start(broker, topic, "--max", "2") as process:
        out, _ = process.communicate(timeout=DEADLINE)
    first, second, third = out.splitlines()
    assert (first.split("  ")[2], second, third.split("  ")[2]) == ("one", "two", "three")


def test_more_than_can_be_kept_without_acks_is_refused(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    """It would wait for ever."""
    publish(client, topic, 2_000)
    with start(broker, topic, "--no-ack", "--max", "2000") as process:
        out, _ = process.communicate(timeout=DEADLINE)
    assert len(out.splitlines()) == 2_000
    with start(broker, topic, "--no-ack", "--max", "10001") as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert "at most 10,000 messages" in errors


async def delete_body(url: str, topic: str, name: str) -> None:
    """Take a body out of the store, behind the broker's back."""
    store = open_store(url, lifetime=60)
    await store.delete(topic, [name])
    await store.close()
