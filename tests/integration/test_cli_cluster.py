"""`keylane cluster` and `keylane rebalance`, as operators type them, against a cluster of four workers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keylane import Client
from tests.support.commands import ask_keylane
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # several workers, and each command is a process

Keylane = Callable[..., Any]


@pytest.fixture(scope="module")
def four() -> Iterator[RunningBroker]:
    """A broker with four workers."""
    with RunningBroker(workers=4) as broker:
        yield broker


@pytest.fixture
def topic_of_eight(four: RunningBroker, topic: str) -> Iterator[str]:
    """A topic that is the only one, so that each worker serves two of its partitions."""
    with Client(four.url) as client:
        client.create_topic(topic, partitions=8)
        yield topic
        client.delete_topic(topic)


@pytest.fixture
def keylane(four: RunningBroker) -> Keylane:
    """Runs a command to its end; answers what it prints, on stderr if it should fail."""
    return lambda *arguments, status=0: ask_keylane(four, *arguments, status=status)


def owners(keylane: Keylane, topic: str) -> list[str]:
    """The worker of each partition, by the command line."""
    return [info["worker"] for info in keylane("cluster", "--topic", topic, "--json")["partitions"]]


def test_the_workers_are_shown_with_their_share(keylane: Keylane, topic_of_eight: str) -> None:
    """As a table with totals, and as JSON."""
    wait_until(lambda: keylane("cluster", "--json")["warnings"] == [])
    report = keylane("cluster", "--json")
    assert [worker["id"] for worker in report["workers"]] == [f"worker-{number}" for number in range(4)]
    assert {worker["state"] for worker in report["workers"]} == {"serving"}
    assert [worker["partitions"] for worker in report["workers"]] == [2] * 4
    assert report["controller"] in {worker["id"] for worker in report["workers"]}
    shown = keylane("cluster")
    assert f"{report['controller']} *" in shown
    assert "4 workers, 8 partitions, " in shown
    assert "warning" not in shown


def test_the_partitions_of_a_topic_are_shown_with_lease_and_ledgers(
    keylane: Keylane, topic_of_eight: str
) -> None:
    """Who is to serve, who holds the lease, and what remains."""
    keylane("subscription", "create", topic_of_eight, "billing")
    keylane("publish", topic_of_eight, "tea", "--partition", "3", "--count", "5")
    found = keylane("cluster", "--topic", topic_of_eight, "--json")
    assert found["topic"] == topic_of_eight
    third = found["partitions"][3]
    assert third["worker"] == third["holder"]
    assert third["lease"] > 0
    assert third["ledgers"][-1] == {"ledger": third["epoch"], "first": 1, "remaining": 5}
    shown = keylane("cluster", "--topic", topic_of_eight)
    assert f"{third['epoch']}: 5" in shown


def test_a_partition_is_moved_and_its_ledger_left_behind(keylane: Keylane, topic_of_eight: str) -> None:
    """The command returns when the new worker serves it; a name may be abbreviated."""
    keylane("subscription", "create", topic_of_eight, "billing")
    keylane("publish", topic_of_eight, "tea", "--partition", "3", "--count", "5")
    before = owners(keylane, topic_of_eight)[3]
    target = next(f"worker-{number}" for number in range(4) if f"worker-{number}" != before)
    moved = keylane("cluster", "move", topic_of_eight, "3", target, "--json")
    assert (moved["topic"], moved["partition"], moved["holder"]) == (topic_of_eight, 3, target)
    assert len(moved["ledgers"]) == 2
    assert moved["ledgers"][0]["remaining"] == 5
    after = owners(keylane, topic_of_eight)
    assert after[3] == target
    assert sorted(after) == sorted(f"worker-{number}" for number in range(4) for _ in range(2))
    text = keylane("cluster", "move", topic_of_eight, "3", before)
    assert text.startswith(f"partition 3 of {topic_of_eight!r} is served by {before}, in epoch ")


def test_a_worker_is_drained_and_takes_partitions_again(keylane: Keylane, topic_of_eight: str) -> None:
    """The command returns when nothing is left."""
    text = keylane("cluster", "drain", "worker-1")
    assert text == "worker-1 has no partitions and can be stopped\n"
    assert "worker-1" not in owners(keylane, topic_of_eight)
    states = {worker["id"]: worker["state"] for worker in keylane("cluster", "--json")["workers"]}
    assert states["worker-1"] == "draining"
    assert keylane("rebalance", "--dry-run") == "nothing to move\n"
    assert keylane("cluster", "drain", "worker-1", "--undo") == "worker-1 takes partitions again\n"
    wait_until(lambda: owners(keylane, topic_of_eight).count("worker-1") == 2)
    answer = keylane("cluster", "drain", "worker-1", "--no-wait", "--json")
    assert (answer["worker"], answer["draining"]) == ("worker-1", True)
    assert keylane("cluster", "drain", "worker-1", "--undo", "--json") == {
        "worker": "worker-1",
        "draining": False,
    }


def test_what_cannot_be_is_an_error_that_names_what_can(keylane: Keylane, topic_of_eight: str) -> None:
    """With 1 for what is not there and 2 for what cannot be meant."""
    everybody = "worker-0, worker-1, worker-2, worker-3"
    assert keylane("cluster", "drain", "x", status=1) == f"error: no worker 'x'; there are {everybody}\n"
    assert f"ambiguous worker 'w': {everybody}" in keylane("cluster", "drain", "w", status=2)
    error = keylane("cluster", "drain", "w", "--json", status=2)["error"]
    assert error["code"] == "usage"
    assert "8" in keylane("cluster", "move", topic_of_eight, "8", "worker-0", status=1)
    wrong = topic_of_eight[:-1]
    for arguments in (["--topic", wrong], ["move", wrong, "0", "worker-0"]):
        assert f"no topic {wrong!r}; did you mean" in keylane("cluster", *arguments, status=1)


def test_nobody_drains_the_last_worker(topic: str) -> None:
    """Nobody could take its partitions."""
    with RunningBroker() as broker:
        ask_keylane(broker, "topic", "create", topic)
        assert "no other worker" in ask_keylane(broker, "cluster", "drain", "worker-0", status=1)
        assert ask_keylane(broker, "rebalance") == "nothing to move\n"
        assert ask_keylane(broker, "rebalance", "--json") == {"dry_run": False, "moves": []}


def test_a_worker_that_is_lost_is_said_to_be_and_doctor_finds_all_served(topic: str) -> None:
    """When others have taken over, there is nothing wrong but the worker."""
    with RunningBroker(workers=2, partition_lease=3.0) as broker:
        ask_keylane(broker, "topic", "create", topic, "--partitions", "4")
        broker.kill_worker(1)

        def lost() -> bool:
            states = [worker["state"] for worker in ask_keylane(broker, "cluster", "--json")["workers"]]
            return "lost" in states

        def taken_over() -> bool:
            places = ask_keylane(broker, "cluster", "--topic", topic, "--json")["partitions"]
            return {place["holder"] for place in places} == {"worker-0"}

        wait_until(lost)
        wait_until(taken_over)
        shown = ask_keylane(broker, "cluster")
        assert "warning: worker-1 at 127.0.0.1:" in shown
        assert "has not been heard from for" in shown
        findings = {item["check"]: item for item in ask_keylane(broker, "doctor", "--json")}
        assert findings["workers"]["ok"]
        assert "worker-1 at 127.0.0.1:" in findings["workers"]["detail"]
        assert "(lost)" in findings["workers"]["detail"]
        assert findings["partitions"]["detail"] == "4 partitions of 1 topic, all served"
