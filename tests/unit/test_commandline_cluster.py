"""What `keylane cluster` and `keylane rebalance` show, without a cluster."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import ClusterReport, LedgerInfo, PartitionInfo, PartitionMove, WorkerInfo
from keylane.commandline.output import CommandError, UsageError
from keylane_broker.commandline.cluster_view import (
    find_worker,
    move_rows,
    partition_rows,
    partition_warnings,
    totals,
    worker_rows,
    worker_warnings,
)

NOW = datetime(2026, 11, 16, 3, tzinfo=UTC)
WORKERS = ["worker-1", "worker-2", "worker-10", "other-0"]


def worker(name: str, **changes: Any) -> WorkerInfo:
    """A worker that serves."""
    facts: dict[str, Any] = {
        "id": name,
        "address": "10.0.0.7:9999",
        "release": "1.0.0",
        "state": "serving",
        "started_at": NOW - timedelta(hours=1),
        "heartbeat_at": NOW - timedelta(seconds=0.4),
        "partitions": 16,
        "messages_per_second": 1_234.4,
        "script_time": 0.0421,
    }
    return WorkerInfo(**(facts | changes))


def partition(number: int, **changes: Any) -> PartitionInfo:
    """A partition that its owner serves."""
    facts: dict[str, Any] = {
        "partition": number,
        "worker": "worker-1",
        "holder": "worker-1",
        "epoch": 7,
        "lease": 4.26,
        "ledgers": [LedgerInfo(7, 1, 12)],
        "messages_per_second": 10.0,
        "script_time": 0.001,
    }
    return PartitionInfo(**(facts | changes))


def report(*workers: WorkerInfo, controller: str = "worker-1") -> ClusterReport:
    """A cluster of these."""
    return ClusterReport(controller=controller, version=17, workers=list(workers))


def test_workers_are_a_line_each_and_the_controller_is_marked() -> None:
    """In the order that people count in."""
    rows = worker_rows(report(worker("worker-10"), worker("worker-9"), worker("worker-1")), NOW)
    assert [row[0] for row in rows] == ["worker-1 *", "worker-9", "worker-10"]
    assert rows[0][1:] == ("10.0.0.7:9999", "serving", 16, 1_234, 42.1, "0.4 s ago")


def test_the_totals_leave_out_who_is_lost() -> None:
    """But not its partitions, which somebody must serve."""
    lost = worker("worker-3", state="lost", partitions=2)
    text = totals(report(worker("worker-1"), worker("worker-2"), lost))
    assert text.startswith("2 workers, 34 partitions, 2,469 messages/s, 84 ms/s in scripts")
    assert totals(report(worker("worker-1", partitions=1))).startswith("1 worker, 1 partition, ")


def test_a_cluster_that_is_well_has_no_troubles() -> None:
    """Draining is a wish, and no trouble."""
    assert worker_warnings(report(worker("worker-1"), worker("worker-2", state="draining")), NOW) == []
    assert partition_warnings({"orders": [partition(0), partition(1)]}) == []


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (
            report(worker("worker-1"), worker("b", state="lost", heartbeat_at=NOW - timedelta(seconds=12))),
            "b at 10.0.0.7:9999 has not been heard from for 12 s",
        ),
        (report(worker("worker-1", state="draining")), "no worker takes partitions"),
        (report(worker("worker-1"), controller=""), "no worker is the controller"),
        (report(worker("worker-1"), worker("b", release="1.1.0")), "run different releases: 1.0.0, 1.1.0"),
    ],
)
def test_what_a_person_must_act_on_is_said(cluster: ClusterReport, text: str) -> None:
    """With what to do."""
    [trouble] = worker_warnings(cluster, NOW)
    assert text in trouble
    assert ";" in trouble or ":" in trouble


def test_partitions_show_who_serves_them_and_what_is_left_in_their_ledgers() -> None:
    """The newest ledgers one by one, the older ones together."""
    ledgers = [LedgerInfo(number, number * 10, 1_000 * number) for number in range(1, 6)]
    moving = partition(1, worker="worker-2", holder="worker-1")
    rows = partition_rows(
        [partition(0, ledgers=ledgers), moving, partition(2, worker="", holder="", ledgers=[])]
    )
    assert rows[0] == (
        *("0", "worker-1", "4.3 s", "7", 10, 1.0),
        "2 older: 3,000, 3: 3,000, 4: 4,000, 5: 5,000",
    )
    assert rows[1][1:3] == ("worker-2", "worker-1, 4.3 s")
    assert rows[2][1:3] == (None, None)
    assert rows[2][-1] == "-"


def test_partitions_that_nobody_serves_are_named_though_not_all() -> None:
    """So that the line stays one that can be read."""
    ownerless = [partition(number, worker="", holder="") for number in range(7)]
    [first, second] = partition_warnings({"orders": ownerless, "bills": [partition(3, holder="")]})
    assert first.startswith(
        "7 partitions without an owner (orders:0, orders:1, orders:2, orders:3, orders:4 and 2 more)"
    )
    assert second.startswith("1 partition whose owner does not hold the lease (bills:3)")


def test_moves_say_from_where_and_why() -> None:
    """What had no owner comes from nowhere."""
    moves = [
        PartitionMove("orders", 3, "worker-1", "worker-2", "even counts"),
        PartitionMove("orders", 4, "", "worker-2", "it had no owner"),
    ]
    assert move_rows(moves) == [
        ("orders", 3, "worker-1", "worker-2", "even counts"),
        ("orders", 4, None, "worker-2", "it had no owner"),
    ]


@pytest.mark.parametrize(
    ("typed", "meant"), [("worker-1", "worker-1"), ("o", "other-0"), ("worker-2", "worker-2")]
)
def test_a_worker_can_be_abbreviated(typed: str, meant: str) -> None:
    """A whole name is never an abbreviation of a longer one."""
    assert find_worker(typed, WORKERS) == meant


def test_an_abbreviation_that_is_not_clear_names_the_workers() -> None:
    """It is a matter of typing; a worker that is not there is not."""
    with pytest.raises(UsageError, match=r"ambiguous worker 'w': worker-1, worker-2, worker-10$"):
        find_worker("w", WORKERS)
    with pytest.raises(
        CommandError, match="no worker 'x'; there are other-0, worker-1, worker-2, worker-10"
    ) as caught:
        find_worker("x", WORKERS)
    assert caught.value.status == 1
