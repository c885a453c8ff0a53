"""`keylane rebalance --plan`, as operators type it, against a cluster of three workers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keylane import Client
from keylane.commandline.output import CommandError
from keylane.commandline.rebalance_plan import PlannedMove, read_plan
from keylane_broker.commandline.rebalance import check, moves_of
from tests.support.commands import ask_keylane
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

Write = Callable[..., str]

OWNERS = {("orders", number): f"w{number % 3}" for number in range(6)}
WORKERS = ["w0", "w1", "w2"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a plan and answers its path."""

    def write(*moves: tuple[str, int, str], **fields: Any) -> str:
        plan = {
            "version": 1,
            "moves": [dict(zip(("topic", "partition", "worker"), move, strict=True)) for move in moves],
        }
        (tmp_path / "plan.json").write_text(json.dumps({**plan, **fields}))
        return str(tmp_path / "plan.json")

    return write


@pytest.fixture(scope="module")
def three() -> Iterator[RunningBroker]:
    """A broker with three workers that do not move anything because of load."""
    with RunningBroker(workers=3, rebalance_interval=3_600) as broker:
        yield broker


@pytest.fixture
def topic_of_six(three: RunningBroker, topic: str) -> Iterator[str]:
    """A topic that is the only one, so that each worker serves two of its partitions."""
    with Client(three.url) as client:
        client.create_topic(topic, partitions=6)
        yield topic
        client.delete_topic(topic)


def holders(broker: RunningBroker, topic: str) -> list[str]:
    """Who has the lease of each partition."""
    with Client(broker.url) as client:
        return [info.holder for info in client.partitions(topic)]


@pytest.mark.slow
def test_a_plan_that_turns_everything_round_is_followed(
    three: RunningBroker, topic_of_six: str, write: Write
) -> None:
    """Every partition goes where it says, whatever comes back on the way; then there is nothing left."""
    before = ask_keylane(three, "cluster", "--topic", topic_of_six, "--json")["partitions"]
    worker_of = {info["partition"]: info["worker"] for info in before}
    turned = {
        name: f"worker-{(number + 1) % 3}" for number, name in enumerate(f"worker-{n}" for n in range(3))
    }
    wanted = [turned[worker_of[number]] for number in range(6)]
    plan = write(*((topic_of_six, number, worker) for number, worker in enumerate(wanted)))
    shown = ask_keylane(three, "rebalance", "--plan", plan, "--dry-run")
    assert "6 partitions would move" in shown
    assert [
        info["worker"]
        for info in ask_keylane(three, "cluster", "--topic", topic_of_six, "--json")["partitions"]
    ] == [worker_of[number] for number in range(6)]
    done = ask_keylane(three, "rebalance", "--plan", plan, "--json")
    assert [(move["partition"], move["source"], move["target"]) for move in done["moves"]] == [
        (number, worker_of[number], wanted[number]) for number in range(6)
    ]
    assert holders(three, topic_of_six) == wanted
    again = ask_keylane(three, "rebalance", "--plan", plan)
    assert again == "nothing to move: all 6 partitions are there already\n"
    assert ask_keylane(three, "rebalance", "--plan", write()) == "nothing to move: the plan is empty\n"
    assert ask_keylane(three, "rebalance", "--dry-run") == "nothing to move\n"  # and nobody undoes it


@pytest.mark.slow
def test_what_is_where_it_should_be_is_left_alone(
    three: RunningBroker, topic_of_six: str, write: Write
) -> None:
    """Two that change places, and one that stays."""
    now = holders_when_settled(three, topic_of_six)
    one = now.index("worker-0")
    other = now.index("worker-1")
    stays = now.index("worker-2")
    plan = write(
        (topic_of_six, one, "worker-1"), (topic_of_six, other, "worker-0"), (topic_of_six, stays, "worker-2")
    )
    shown = ask_keylane(three, "rebalance", "--plan", plan)
    assert "2 partitions moved, 1 are there already" in shown
    after = holders(three, topic_of_six)
    assert (after[one], after[other], after[stays]) == ("worker-1", "worker-0", "worker-2")
    assert sorted(after) == sorted(now)


def holders_when_settled(broker: RunningBroker, topic: str) -> list[str]:
    """Who holds what, when all have what they are to serve."""
    with Client(broker.url) as client:
        wait_until(lambda: all(at.holder == at.worker != "" for at in client.partitions(topic)))
        return [at.holder for at in client.partitions(topic)]


@pytest.mark.slow
def test_what_cannot_be_followed_moves_nothing_and_says_why(
    three: RunningBroker, topic_of_six: str, write: Write, tmp_path: Path
) -> None:
    """With 1 for what is not there and 2 for what is not a plan."""
    now = holders_when_settled(three, topic_of_six)
    other = next(worker for worker in ("worker-0", "worker-1") if worker != now[0])
    assert "no partition 6" in ask_keylane(
        three, "rebalance", "--plan", write((topic_of_six, 0, other), (topic_of_six, 6, other)), status=1
    )
    assert "version 2" in ask_keylane(three, "rebalance", "--plan", write(version=2), status=2)
    error = ask_keylane(three, "rebalance", "--plan", str(tmp_path / "none"), "--json", status=2)["error"]
    assert error["code"] == "usage"
    assert holders(three, topic_of_six) == now


@pytest.mark.parametrize(
    ("move", "problem"),
    [
        (PlannedMove("ordes", 0, "w1"), "no topic 'ordes'; there are orders"),
        (PlannedMove("orders", 6, "w1"), "topic 'orders' has no partition 6: it has 0 to 5"),
        (PlannedMove("orders", -1, "w1"), "topic 'orders' has no partition -1: it has 0 to 5"),
        (PlannedMove("orders", 0, "w9"), "worker 'w9' cannot take partitions; those that can: w0, w1, w2"),
    ],
)
def test_a_plan_is_checked_before_anything_moves(move: PlannedMove, problem: str) -> None:
    """Each mistake with what would be right."""
    with pytest.raises(CommandError) as caught:
        check([PlannedMove("orders", 0, "w1"), move], OWNERS, WORKERS)
    assert str(caught.value) == problem


def test_a_plan_that_the_cluster_would_undo_is_refused() -> None:
    """Three of six on one worker of three; but an exchange is all right, and so is a partition alone."""
    check([PlannedMove("orders", 0, "w1")], OWNERS, WORKERS)
    check([PlannedMove("orders", 0, "w1"), PlannedMove("orders", 1, "w0")], OWNERS, WORKERS)
    crowd = [PlannedMove("orders", number, "w1") for number in (0, 1, 2)]
    with pytest.raises(CommandError, match="counts must be even within one"):
        check(crowd, OWNERS, WORKERS)


def test_what_is_so_already_is_no_move() -> None:
    """Only the others are."""
    plan = [PlannedMove("orders", 0, "w0"), PlannedMove("orders", 1, "w2")]
    assert [(move.partition, move.source, move.target) for move in moves_of(plan, OWNERS)] == [
        (1, "w1", "w2")
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a plan"),
        ('{"version": 1}', "is not a plan: Object missing required field `moves`"),
        (
            '{"version": 1, "moves": [{"topic": "a", "partition": "0", "worker": "w"}]}',
            "is not a plan: Expected `int`",
        ),
        (
            '{"version": 1, "moves": [{"topic": "a", "partition": 0, "worker": "w"}, '
            '{"topic": "a", "partition": 0, "worker": "v"}]}',
            "names a partition more than once: a:0",
        ),
    ],
    ids=["not JSON", "no moves", "wrong type", "twice"],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Before anybody is asked."""
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CommandError) as caught:
        read_plan(tmp_path / "plan.json")
    assert problem in str(caught.value)
