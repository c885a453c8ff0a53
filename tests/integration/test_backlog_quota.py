"""A full backlog, as applications see it, by clients and commands, on a server and on a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import BacklogFull, Client, OutgoingMessage, Published, PublishFailed
from tests.support import commands
from tests.support.emptied import PLACES, broker_on, leaves_nothing
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow

SOON = 60.0  # seconds


@pytest.fixture(scope="module", params=PLACES)
def broker(request: pytest.FixtureRequest, server_binary: Path) -> Iterator[RunningBroker]:
    """A broker of two workers, on each of these."""
    with broker_on(request.param, server_binary) as broker:
        yield broker


async def test_publishing_beyond_the_quota_is_refused_until_consumers_have_caught_up(
    broker: RunningBroker, topic: str
) -> None:
    with Client(broker.url) as client:
        made = client.create_topic(topic, partitions=1, backlog_quota=3)
        assert made.backlog_quota == 3
        client.create_subscription(topic, "s")
        client.publish(topic, "0")
        with pytest.raises(PublishFailed) as caught:
            client.publish_many(topic, [OutgoingMessage(f"{n}") for n in range(1, 5)])
        kinds = [type(answer) for answer in caught.value.published]
        assert kinds == [Published, Published, BacklogFull, BacklogFull]
        assert isinstance(caught.value, BacklogFull)
        assert (caught.value.code, caught.value.retriable) == ("backlog_full", True)
        with pytest.raises(BacklogFull, match="was not stored") as refused:
            client.publish(topic, "5")
        assert refused.value.retriable
        with pytest.raises(BacklogFull):
            client.publish(topic, "6", delay=60)
        assert client.describe_topic(topic).messages == 3
        with client.subscribe(topic, "s") as consumer:
            for n in range(3):
                with consumer.receive(SOON) as message:
                    assert int(message.data()) == n
        assert client.publish(topic, "7").id is not None
        with client.subscribe(topic, "s") as consumer, consumer.receive(SOON) as message:
            assert message.data() == b"7"
    await leaves_nothing(broker, topic)  # nor any body of what was refused


def test_commands(broker: RunningBroker, topic: str) -> None:
    def keylane(*arguments: str, status: int = 0) -> str:
        done = commands.keylane(*arguments, status=status, KEYLANE_SERVER=broker.url)
        return done.stderr if status else done.stdout

    made = json.loads(keylane(*f"topic create {topic} --partitions 1 --backlog-quota 1 --json".split()))
    assert made["backlog_quota"] == 1
    with Client(broker.url) as client:
        client.create_subscription(topic, "s")
    keylane("publish", topic, "one")
    assert "backlog" in keylane("publish", topic, "two", status=1)
    assert "may have 5 messages unsettled" in keylane("topic", "change", topic, "--backlog-quota", "5")
    keylane("publish", topic, "two")
    assert "any number" in keylane("topic", "change", topic, "--backlog-quota", "0")


async def test_bytes_beyond_the_quota_are_refused(broker: RunningBroker, topic: str) -> None:
    def keylane(*arguments: str, status: int = 0) -> str:
        done = commands.keylane(*arguments, status=status, KEYLANE_SERVER=broker.url)
        return done.stderr if status else done.stdout

    made = json.loads(
        keylane(*f"topic create {topic} --partitions 1 --backlog-quota-bytes 10 --json".split())
    )
    assert (made["backlog_quota"], made["backlog_quota_bytes"]) == (None, 10)
    with Client(broker.url) as client:
        client.create_subscription(topic, "s")
        client.publish(topic, b"x" * 6)
        with pytest.raises(BacklogFull, match="backlog_quota_bytes"):
            client.publish(topic, b"x" * 5)
        assert client.change_topic(topic, backlog_quota_bytes=11).backlog_quota_bytes == 11
        client.publish(topic, b"x" * 5)
        assert "backlog" in keylane("publish", topic, "y", status=1)
        with client.subscribe(topic, "s") as consumer:
            for _ in range(2):
                with consumer.receive(SOON):
                    pass
        client.publish(topic, b"x" * 11)
        assert client.describe_topic(topic).backlog_quota_bytes == 11
        assert "any size" in keylane("topic", "change", topic, "--backlog-quota-bytes", "0")
        client.publish(topic, b"x")
        with client.subscribe(topic, "s") as consumer:
            for _ in range(2):
                with consumer.receive(SOON):
                    pass
    await leaves_nothing(broker, topic)
