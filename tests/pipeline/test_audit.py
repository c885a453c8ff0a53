"""The audit on journals that are written down here, or made up at random."""

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.archived import read_archive
from pipeline.audit import examine
from pipeline.commandline import Trouble
from pipeline.findings import Audit
from pipeline.journal import coverage_of, frame_of, lives_of, timeline_of
from pipeline.judgement import judge
from pipeline.report import write_audit
from pipeline.snapshot import Snapshot, islands
from pipeline.sweep import ranges_of, stretches_of
from tests.pipeline.journals import NOON_MS, Line, frames_of, journal_of, log_of, snapshot_of
from tests.pipeline.plain_audit import judge_plainly
from tests.pipeline.simulation import Partition

pytestmark = pytest.mark.slow

PARTITIONS = 160


def judge_on_spark(
    spark: SparkSession, snapshot: Snapshot, journal: DataFrame, log: DataFrame
) -> Counter[tuple[int, str, int, str, int]]:
    """How many (partition, subscription, entry, state, deliveries) the job finds."""
    timeline = timeline_of(journal)
    covered = frame_of(spark, coverage_of(journal, timeline, snapshot), snapshot)
    lives = lives_of(spark, journal, timeline, snapshot)
    judged = judge(stretches_of(ranges_of(journal, lives, covered, islands(log), None)), lives, covered)
    found: Counter[tuple[int, str, int, str, int]] = Counter()
    for row in judged.collect():
        for entry in range(row.first, row.last + 1):
            found[row.partition, row.subscription, entry, row.state, row.delivered] += 1
    return found


@pytest.mark.parametrize("thief", [False, True], ids=["honest", "robbed"])
def test_the_job_says_of_every_message_what_a_plain_audit_says(spark: SparkSession, thief: bool) -> None:
    """Of random partitions with subscriptions that come, go, seek and share."""
    looks = []
    for seed in range(PARTITIONS):
        luck = random.Random(seed)
        looks.append(Partition(luck, thief=thief).live(luck.randint(10, 120)))
    expected = Counter(
        {
            (number, *key): count
            for number, look in enumerate(looks)
            for key, count in judge_plainly(look).items()
        }
    )
    found = judge_on_spark(spark, *frames_of(spark, looks))
    assert found - expected == Counter()
    assert expected - found == Counter()
    assert len(expected) > 3_000


def audited(
    spark: SparkSession,
    lines: Sequence[Line],
    *,
    latest: int,
    log: Sequence[int] = (),
    billing: int | None = None,
    first: int = 1,
    since: datetime | None = None,
    journal: int = 1_000_000,
) -> Audit:
    """The audit of one partition; `billing` is the position of that subscription, if it is there."""
    positions = {} if billing is None else {"billing": [billing]}
    seen = snapshot_of([latest], earliest=[first], journal=journal, **positions)
    records = journal_of(spark, {0: lines}, first=first)
    return examine(spark, seen, records, log_of(spark, {0: log}), since=since)


def ids(found: Audit) -> list[tuple[str, str]]:
    """What is lost, and why."""
    return [(message.message_id, message.reason) for message in found.lost]


MADE: Line = ("subscribed", "billing", "1")
FIVE: Line = ("published", "", "1-5")
DELIVERED: Line = ("delivered", "billing", "1-5")
ACKED: Line = ("acked", "billing", "1-5")


def test_all_delivered_and_acked_is_complete(spark: SparkSession) -> None:
    """With counts, attempts and latencies."""
    lines: list[Line] = [
        MADE,
        FIVE,
        ("delivered", "billing", "1-5", 250),
        ("nacked", "billing", "2", 0),
        ("acked", "billing", "1 3-5", 750),
        ("delivered", "billing", "2", 4_000),
        ("acked", "billing", "2", 1_000),
    ]
    found = audited(spark, lines, latest=6, billing=6)
    assert (found.verdict, found.unproven, found.messages, found.lost) == ("complete", 0, 5, [])
    [billing] = found.subscriptions
    assert (billing.messages, billing.settled, billing.duplicates, billing.deliveries) == (5, 5, 1, 6)
    assert billing.attempts == {"1": 4, "2": 1}
    assert billing.transitions["nacked"] == 1
    [acked, delivered] = found.latency
    assert (delivered.what, delivered.messages, delivered.p50, delivered.max) == ("delivered", 5, 250, 250)
    assert (acked.what, acked.messages, acked.p50, acked.p99, acked.max) == ("acked", 5, 1_000, 6_000, 6_000)
    assert {line.hour_ms for line in found.latency_by_hour} == {NOON_MS}


def test_what_is_leased_or_waits_is_no_failure(spark: SparkSession) -> None:
    """Nor what came after the first look."""
    lines: list[Line] = [
        MADE,
        FIVE,
        ("delivered", "billing", "1-3"),
        ("acked", "billing", "1"),
        ("published", "", "6-9"),
    ]
    found = audited(spark, lines, latest=6, log=[2, 3, 4, 5], billing=4)
    assert found.verdict == "complete"
    [billing] = found.subscriptions
    assert (billing.settled, billing.in_flight, billing.waiting, billing.lost) == (1, 2, 6, 0)


@pytest.mark.parametrize(
    ("lines", "log", "position", "lost"),
    [
        (
            [MADE, FIVE, ("delivered", "billing", "1-3 5"), ("acked", "billing", "1-3 5")],
            [],
            6,
            "undelivered",
        ),
        ([MADE, FIVE, DELIVERED, ("acked", "billing", "1-3 5")], [], 6, "unsettled"),
        ([MADE, FIVE, DELIVERED, ("lost", "billing", "4"), ("acked", "billing", "1-3 5")], [], 6, "missing"),
        (
            [MADE, FIVE, ("delivered", "billing", "1-3 5"), ("acked", "billing", "1-3 5")],
            [4],
            6,
            "passed_over",
        ),
    ],
    ids=["undelivered", "unsettled", "missing", "passed over"],
)
def test_a_lost_message_is_named_with_the_reason(
    spark: SparkSession, lines: list[Line], log: list[int], position: int, lost: str
) -> None:
    """And the verdict is incomplete."""
    found = audited(spark, lines, latest=6, log=log, billing=position)
    assert (found.verdict, ids(found), found.lost_total) == ("incomplete", [("0:1-4", lost)], 1)
    assert found.subscriptions[0].lost_by_reason == {lost: 1}
    assert found.lost[0].key == ("k4" if log else None)
    assert "billing: 1 message lost" in found.why[0]


def test_a_lost_message_has_the_ledger_it_was_published_in(spark: SparkSession) -> None:
    """Which is a part of its id."""
    lines: list[Line] = [MADE, ("published", "", "3:1-5"), ("moved", "", "6"), ("published", "", "7:6-9")]
    found = audited(spark, lines, latest=10, log=[1, 2, 3, 4, 6, 7, 9], billing=1)
    assert ids(found) == [("0:3-5", "undelivered"), ("0:7-8", "undelivered")]


def test_more_lost_messages_than_are_listed_are_counted(spark: SparkSession) -> None:
    """Lists are cut, counts are not."""
    seen = snapshot_of([5_001], billing=[1])
    lines: list[Line] = [MADE, ("published", "", "1-5000")]
    found = examine(spark, seen, journal_of(spark, {0: lines}), log_of(spark, {0: []}), listed=10)
    assert (found.lost_total, [message.entry for message in found.lost]) == (5_000, list(range(1, 11)))


def test_what_a_subscription_gave_up_is_not_lost(spark: SparkSession) -> None:
    """It was deleted, or moved on by a seek."""
    lines: list[Line] = [MADE, FIVE, ("sought", "billing", "4"), ("subscribed", "search", "6")]
    lines += [("published", "", "6-7"), ("unsubscribed", "search", "6")]
    found = audited(spark, lines, latest=8, log=[4, 5, 6, 7], billing=4)
    assert found.verdict == "complete"
    billing, search = found.subscriptions
    assert (billing.let_go, billing.waiting) == (3, 4)
    assert (search.messages, search.let_go) == (2, 2)


def test_a_subscription_that_comes_back_under_its_name_begins_a_new_life(spark: SparkSession) -> None:
    """What its first life owed is over, and what the second owes is judged by itself."""
    lines: list[Line] = [MADE, FIVE, ("unsubscribed", "billing", "1"), ("subscribed", "search", "6")]
    lines += [("published", "", "6-7"), ("subscribed", "billing", "6"), ("published", "", "8-9")]
    lines += [("acked", "search", "6-7")]
    found = audited(spark, lines, latest=10, log=[8], billing=6)
    # 6 and 7 are older than the second life; search settled them after it had begun, so they were there.
    assert [
        (message.entry, message.reason) for message in found.lost if message.subscription == "billing"
    ] == [
        (6, "undelivered"),
        (7, "undelivered"),
        (9, "undelivered"),
    ]


def test_a_journal_without_its_beginning_proves_nothing_about_what_was_before(spark: SparkSession) -> None:
    """A subscription that is older than it owes everything in it."""
    lines: list[Line] = [
        ("acked", "billing", "90-99"),
        ("published", "", "101-105"),
        ("delivered", "billing", "101-104"),
    ]
    lines += [("acked", "billing", "101-104"), ("acked", "billing", "100")]
    found = audited(spark, lines, latest=106, log=[105], billing=105, first=61)
    assert (found.verdict, found.unproven) == ("unproven", 100)
    assert found.why == ["partition 0: 100 messages unproven: the journal begins at entry 101"]
    assert (found.subscriptions[0].settled, found.subscriptions[0].waiting) == (4, 1)
    lost = audited(spark, lines, latest=106, billing=105, first=61)
    assert (lost.verdict, ids(lost)) == ("incomplete", [("0:1-105", "undelivered")])


def test_since_a_time_that_the_journal_covers_is_proof_enough(spark: SparkSession) -> None:
    """So a topic whose journal is cut now and then can be complete, too."""
    lines: list[Line] = [
        ("acked", "billing", "90-99"),
        ("published", "", "101-105", 5_000),
        ("published", "", "106", 5_000),
    ]
    lines += [("delivered", "billing", "101-106"), ("acked", "billing", "101-106")]
    for seconds, verdict, messages in ((0, "unproven", 6), (1, "complete", 6), (7, "complete", 1)):
        since = datetime.fromtimestamp(NOON_MS / 1_000 + seconds, UTC)
        found = audited(spark, lines, latest=107, billing=107, first=61, since=since)
        assert (found.verdict, found.messages) == (verdict, messages), seconds


@pytest.mark.parametrize("cap", [0, 1_000_000])
def test_a_journal_that_is_off_proves_nothing(spark: SparkSession, cap: int) -> None:
    """Off now, or on but without what was published last."""
    found = audited(spark, [MADE, FIVE], latest=9 if cap else 6, billing=1, journal=cap)
    assert (found.verdict, found.unproven, found.lost) == ("unproven", 8 if cap else 5, [])


def test_a_hole_in_the_journal_proves_nothing_about_what_was_before(spark: SparkSession) -> None:
    """It was off for a while: who knows what happened then."""
    lines: list[Line] = [
        MADE,
        FIVE,
        ("published", "", "9-10"),
        ("delivered", "billing", "9-10"),
        ("acked", "billing", "9-10"),
    ]
    found = audited(spark, lines, latest=11, billing=11)
    assert (found.verdict, found.unproven, found.lost) == ("unproven", 8, [])
    assert "was off before entry 9" in found.why[0]


def test_an_empty_topic_is_complete(spark: SparkSession) -> None:
    """There is nothing to prove."""
    found = audited(spark, [MADE], latest=1, billing=1)
    assert (found.verdict, found.messages, found.activity) == ("complete", 0, [])


def archive_of(spark: SparkSession, folder: Path, ids: Sequence[str]) -> Path:
    """An archive with these messages."""
    rows = [(f"k{name}", *map(int, (name.partition(":")[0], name.rpartition("-")[2])), name) for name in ids]
    frame = spark.createDataFrame(rows, "key string, partition int, offset long, message_id string")
    frame.write.parquet(str(folder / "archive" / "topic=orders" / "date=2026-11-16"))
    return folder / "archive"


def test_the_archive_is_held_against_the_journal(spark: SparkSession, tmp_path: Path) -> None:
    """What it lacks, what it has twice, and what never was."""
    lines: list[Line] = [
        ("subscribed", "archive", "1"),
        ("published", "", "2:1-9"),
        ("committed", "archive", "1-6"),
    ]
    kept = ["0:2-1", "0:2-2", "0:2-2", "0:9-3", "0:2-5", "0:2-7", "0:2-11", "0:2-30", "4:1-1"]
    path = archive_of(spark, tmp_path, kept)
    rows = read_archive(spark, path, "orders")
    seen, journal = snapshot_of([10], archive=[7]), journal_of(spark, {0: lines})
    found = examine(
        spark, seen, journal, log_of(spark, {0: [7, 8, 9]}), archive=(path, "archive", rows, {0: 20})
    )
    archive = found.archive
    assert archive is not None
    assert found.verdict == "incomplete"
    assert (archive.rows, archive.messages, archive.duplicates, archive.committed) == (9, 8, 1, 6)
    assert archive.missing_ids == ["0:2-4", "0:2-6"]
    assert archive.never_published_ids == ["0:9-3", "0:2-30", "4:1-1"]
    assert archive.duplicate_ids == ["0:2-2"]
    assert (archive.missing, archive.never_published, archive.newer, archive.unproven) == (2, 3, 1, 0)


def test_the_archive_of_a_subscription_that_the_journal_does_not_have_is_unproven(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The name of the right one is to be given."""
    path = archive_of(spark, tmp_path, ["0:1-1"])
    rows = read_archive(spark, path, "orders")
    seen, journal = snapshot_of([6], billing=[6]), journal_of(spark, {0: [MADE, FIVE, DELIVERED, ACKED]})
    found = examine(spark, seen, journal, log_of(spark, {0: []}), archive=(path, "lake", rows, {0: 6}))
    assert found.verdict == "unproven"
    assert "no subscription 'lake'" in found.why[0]


def test_an_archive_without_the_topic_names_those_it_has(spark: SparkSession, tmp_path: Path) -> None:
    """Rather than an empty result."""
    path = archive_of(spark, tmp_path, ["0:1-1"])
    with pytest.raises(Trouble, match="no archive of 'ordes' in .*; it has orders"):
        read_archive(spark, path, "ordes")


def test_the_report_is_one_file_with_its_pictures(spark: SparkSession, tmp_path: Path) -> None:
    """And the same as JSON."""
    lines: list[Line] = [MADE, FIVE, ("delivered", "billing", "1-3 5"), ("acked", "billing", "1-3 5")]
    found = audited(spark, lines, latest=6, billing=6)
    write_audit(found, tmp_path)
    page = (tmp_path / "audit.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64,") == 5
    assert "0:1-4" in page
    assert ">incomplete<" in page
    said = msgspec.json.decode((tmp_path / "audit.json").read_bytes(), type=Audit)
    assert said == found
