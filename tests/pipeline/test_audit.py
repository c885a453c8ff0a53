"""The audit on journals that are written down here, or made up at random."""

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.archived import Archive
from pipeline.audit import examine
from pipeline.commandline import Trouble
from pipeline.findings import Audit, proof_of
from pipeline.journal import Coverage, coverage_of, extent_of, frame_of, lives_of, timeline_of
from pipeline.judgement import judge
from pipeline.report import write_audit
from pipeline.snapshot import Snapshot, islands, local
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
    covered = frame_of(spark, coverage_of(timeline, extent_of(journal), snapshot), snapshot)
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


def ids(found: Audit) -> list[tuple[str, str]]:
    """What is lost, and why."""
    return [(message.message_id, message.reason) for message in found.lost]


MADE: Line = ("subscribed", "billing", "1")
FIVE: Line = ("published", "", "1-5")
DELIVERED: Line = ("delivered", "billing", "1-5")
ACKED: Line = ("acked", "billing", "1-5")
ALL_BUT_FOUR: list[Line] = [("delivered", "billing", "1-3 5"), ("acked", "billing", "1-3 5")]


class Case:
    """A partition: its journal, where its log ends and what it has, the position of billing, what is lost."""

    def __init__(
        self,
        lines: Sequence[Line],
        latest: int,
        log: Sequence[int],
        billing: int | None,
        *lost: tuple[str, str],
    ) -> None:
        self.lines, self.latest, self.log, self.billing, self.lost = lines, latest, log, billing, list(lost)


CASES = {
    "all acked": Case([MADE, FIVE, DELIVERED, ACKED], 6, [], 6),
    "leased, waiting, and newer than the first look": Case(
        [MADE, FIVE, ("delivered", "billing", "1-3"), ("acked", "billing", "1"), ("published", "", "6-9")],
        6,
        [2, 3, 4, 5],
        4,
    ),
    "never delivered": Case([MADE, FIVE, *ALL_BUT_FOUR], 6, [], 6, ("1-4", "undelivered")),
    "never settled": Case(
        [MADE, FIVE, DELIVERED, ("acked", "billing", "1-3 5")], 6, [], 6, ("1-4", "unsettled")
    ),
    "not found by the worker": Case(
        [MADE, FIVE, DELIVERED, ("lost", "billing", "4"), ("acked", "billing", "1-3 5")],
        6,
        [],
        6,
        ("1-4", "missing"),
    ),
    "passed over": Case([MADE, FIVE, *ALL_BUT_FOUR], 6, [4], 6, ("1-4", "passed_over")),
    "in two ledgers": Case(
        [MADE, ("published", "", "3:1-5"), ("moved", "", "6"), ("published", "", "7:6-9")],
        10,
        [1, 2, 3, 4, 6, 7, 9],
        1,
        ("3-5", "undelivered"),
        ("7-8", "undelivered"),
    ),
    "given up": Case(
        [
            MADE,
            FIVE,
            ("sought", "billing", "4"),
            ("subscribed", "search", "6"),
            ("published", "", "6-7"),
            ("unsubscribed", "search", "6"),
        ],
        8,
        [4, 5, 6, 7],
        4,
    ),
    # 6 and 7 are older than the second life; search settled them after it had begun, so they were there.
    "a second life": Case(
        [
            MADE,
            FIVE,
            ("unsubscribed", "billing", "1"),
            ("subscribed", "search", "6"),
            ("published", "", "6-7"),
            ("subscribed", "billing", "6"),
            ("published", "", "8-9"),
            ("acked", "search", "6-7"),
            ("unsubscribed", "search", "8"),
        ],
        10,
        [8],
        6,
        ("1-6", "undelivered"),
        ("1-7", "undelivered"),
        ("1-9", "undelivered"),
    ),
    "older than the subscription": Case([FIVE, MADE, ("published", "", "6")], 7, [6], 1),
    "half of it newer than the first look": Case([MADE, ("published", "", "1-9")], 6, range(1, 6), 1),
    "half of it passed over": Case(
        [MADE, ("published", "", "1-9")],
        10,
        range(1, 10),
        4,
        *((f"1-{entry}", "passed_over") for entry in (1, 2, 3)),
    ),
    # What the journal calls lost is, even where it proves nothing else.
    "before a hole in the journal": Case(
        [MADE, FIVE, ("lost", "billing", "2"), ("published", "", "9-10")], 11, [9, 10], 9, ("1-2", "missing")
    ),
    "a million": Case(
        [MADE, ("published", "", "1-1000000"), ("acked", "billing", "1-1000000")], 1_000_001, [], 6
    ),
}
NAMES = list(CASES)


@pytest.fixture(scope="module")
def cases(spark: SparkSession) -> Audit:
    """All cases as the partitions of one topic, which takes as long as one of them."""
    every = list(CASES.values())
    seen = snapshot_of([case.latest for case in every], billing=[case.billing for case in every])
    journal = journal_of(spark, {number: case.lines for number, case in enumerate(every)})
    return examine(
        spark, seen, journal, log_of(spark, {number: case.log for number, case in enumerate(every)})
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_lost_is_named_with_the_reason(cases: Audit, name: str) -> None:
    """By its id; everything else is not a failure."""
    number = NAMES.index(name)
    lost = [message for message in cases.lost if message.partition == number]
    assert {message.subscription for message in lost} <= {"billing"}
    assert [(message.message_id, message.reason) for message in lost] == [
        (f"{number}:{name}", reason) for name, reason in CASES[name].lost
    ]


def test_the_counts_are_of_all_partitions(cases: Audit) -> None:
    """And the verdict is on all of them."""
    assert cases.verdict == "incomplete"
    assert cases.lost_total == len(cases.lost) == sum(len(case.lost) for case in CASES.values())
    billing, search = cases.subscriptions
    assert billing.lost_by_reason == {"undelivered": 6, "unsettled": 1, "missing": 2, "passed_over": 4}
    assert (billing.backlog, billing.undelivered, billing.let_go, billing.not_owed) == (38, 36, 8, 5)
    assert billing.settled == 5 + 1 + 4 * 4 + 1_000_000
    assert (search.let_go, search.settled) == (2 + 2, 2)
    assert [message.key for message in cases.lost if message.reason == "passed_over"] == [
        "k4",
        "k1",
        "k2",
        "k3",
    ]
    assert any("billing: 6 messages lost: never delivered" in why for why in cases.why)


def test_the_report_is_one_file_with_its_pictures(cases: Audit, tmp_path: Path) -> None:
    """And the same as JSON."""
    write_audit(cases, tmp_path)
    page = (tmp_path / "audit.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 5
    assert f"{NAMES.index('never delivered')}:1-4<" in page
    assert ">incomplete<" in page
    assert msgspec.json.decode((tmp_path / "audit.json").read_bytes(), type=Audit) == cases


def test_attempts_and_latencies_and_a_whole_archive(spark: SparkSession, tmp_path: Path) -> None:
    """All there, delivered and acked: complete."""
    lines: list[Line] = [
        MADE,
        ("subscribed", "archive", "1"),
        ("published", "", "1-5"),
        ("delivered", "billing", "1-5", 250),
        ("nacked", "billing", "2", 0),
        ("acked", "billing", "1 3-5", 750),
        ("delivered", "billing", "2", 4_000),
        ("acked", "billing", "2", 1_000),
        ("committed", "archive", "1-4", 4_000),
    ]
    archive = archive_of(spark, tmp_path, [f"0:1-{entry}" for entry in range(1, 6)], {0: 6})
    seen = snapshot_of([6], billing=[6], archive=[5])
    found = examine(spark, seen, journal_of(spark, {0: lines}), log_of(spark, {0: [5]}), archive=archive)
    assert (found.verdict, found.unproven, found.messages, found.lost) == ("complete", 0, 5, [])
    kept, billing = found.subscriptions
    assert (kept.settled, kept.backlog) == (4, 1)
    assert (billing.messages, billing.settled, billing.duplicates, billing.deliveries) == (5, 5, 1, 6)
    assert billing.attempts == {"1": 4, "2": 1}
    assert billing.transitions == {"acked": 5, "delivered": 6, "nacked": 1, "subscribed": 1}
    _, acked, delivered = found.latency
    assert (delivered.what, delivered.messages, delivered.p50, delivered.max) == ("delivered", 5, 250, 250)
    assert (acked.what, acked.messages, acked.p50, acked.p99, acked.max) == ("acked", 5, 1_000, 6_000, 6_000)
    assert {line.hour_ms for line in found.latency_by_hour} == {NOON_MS}
    assert found.archive is not None
    assert (found.archive.committed, found.archive.missing, found.archive.never_published) == (4, 0, 0)


def test_an_archive_is_held_against_the_journal(spark: SparkSession, tmp_path: Path) -> None:
    """What it lacks, what it has twice, and what never was; lists are cut, counts are not."""
    lines: list[Line] = [
        ("subscribed", "archive", "1"),
        ("published", "", "2:1-9"),
        ("committed", "archive", "1-6"),
    ]
    kept = ["0:2-1", "0:2-2", "0:2-2", "0:9-3", "0:2-5", "0:2-7", "0:2-11", "0:2-30", "4:1-1"]
    archive = archive_of(spark, tmp_path, kept, {0: 20})
    seen, journal = snapshot_of([10], archive=[7]), journal_of(spark, {0: lines})
    found = examine(spark, seen, journal, log_of(spark, {0: [7, 8, 9]}), archive=archive, listed=2)
    checked = found.archive
    assert checked is not None
    assert found.verdict == "incomplete"
    assert (checked.rows, checked.messages, checked.duplicates, checked.committed) == (9, 8, 1, 6)
    assert checked.missing_ids == ["0:2-4", "0:2-6"]
    assert checked.never_published_ids == ["0:9-3", "0:2-30"]
    assert checked.duplicate_ids == ["0:2-2"]
    assert (checked.missing, checked.never_published, checked.newer, checked.unproven) == (2, 3, 1, 0)


def archive_of(spark: SparkSession, folder: Path, ids: Sequence[str], newest: dict[int, int]) -> Archive:
    """An archive with these messages."""
    rows = [(f"k{name}", *map(int, (name.partition(":")[0], name.rpartition("-")[2])), name) for name in ids]
    frame = local(spark, rows, "key string, partition int, offset long, message_id string")
    frame.write.parquet(str(folder / "archive" / "topic=orders" / "date=2026-11-16"))
    archive = Archive.read(spark, folder / "archive", "orders", "archive")
    archive.newest = newest
    return archive


def test_an_archive_without_the_topic_names_those_it_has(spark: SparkSession, tmp_path: Path) -> None:
    """Rather than an empty result."""
    path = archive_of(spark, tmp_path, ["0:1-1"], {}).path
    with pytest.raises(Trouble, match=r"no archive of 'ordes' in .*; it has orders"):
        Archive.read(spark, path, "ordes", "archive")


def covered(spark: SparkSession, lines: Sequence[Line], latest: int, first: int, cap: int = 9) -> Coverage:
    """What a journal covers of a partition."""
    seen = snapshot_of([latest], earliest=[first], journal=cap)
    journal = journal_of(spark, {0: lines}, first=first)
    [found] = coverage_of(timeline_of(journal), extent_of(journal), seen)
    return found


def test_a_journal_without_its_beginning_proves_nothing_about_what_was_before(spark: SparkSession) -> None:
    """Nor one that was off for a while, or is."""
    later: list[Line] = [("acked", "billing", "90-99"), ("published", "", "101-105", 5_000)]
    found = covered(spark, later, 106, first=61)
    assert found == Coverage(0, 101, 106, NOON_MS + 1_000, NOON_MS + 6_000, False)
    assert proof_of(found, 106, 0).why == "the journal begins at entry 101"
    assert proof_of(found, 106, 0).unproven == 100
    # Nothing that is older than its oldest record can have been published since.
    assert proof_of(found, 106, NOON_MS).unproven == 100
    assert proof_of(found, 106, NOON_MS + 1_000).unproven == 0

    hole: list[Line] = [MADE, FIVE, ("published", "", "9-10")]
    found = covered(spark, hole, 11, first=1)
    assert (found.first, found.hole) == (9, True)
    assert proof_of(found, 11, 0).why == "the journal was off before entry 9"
    assert [proof_of(found, 11, NOON_MS + after).unproven for after in (2_000, 3_000)] == [8, 0]

    for cap, latest in ((0, 6), (9, 9)):  # off; or on, but without what was published last
        found = covered(spark, [MADE, FIVE], latest, first=1, cap=cap)
        proof = proof_of(found, latest, 0)
        assert (found.first, proof.unproven) == (latest, latest - 1)
        assert "off" in proof.why


def test_what_is_judged_is_what_is_proven_since_a_time(spark: SparkSession) -> None:
    """Entries whose publish is not known, or is older than asked for, are not judged."""
    lines: list[Line] = [("published", "", "101-105", 5_000), ("published", "", "106-107", 5_000)]
    seen, journal = snapshot_of([108], earliest=[61], billing=[1]), journal_of(spark, {0: lines}, first=61)
    since = datetime.fromtimestamp(NOON_MS / 1_000 + 7, UTC)
    found = examine(spark, seen, journal, log_of(spark, {0: [100]}), since=since)
    assert ids(found) == [("0:1-106", "undelivered"), ("0:1-107", "undelivered")]
    assert (found.verdict, found.messages, found.unproven) == ("incomplete", 2, 0)
