"""The audit on journals that are written down here, or made up at random: by Spark, and without."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from keylane_spark.archiving.folders import archive_folder
from keylane_spark.auditing.findings import Audit, PartitionCoverage
from keylane_spark.auditing.in_memory import audit as in_memory
from keylane_spark.auditing.in_memory.archive_check import InMemoryArchive
from keylane_spark.auditing.report import write_audit
from keylane_spark.auditing.with_spark import engine as with_spark
from keylane_spark.auditing.with_spark.archive_check import Archive
from keylane_spark.errors import JobError
from keylane_spark.files import LocalFiles
from keylane_spark.snapshot import BodiesState, Snapshot
from tests.pipeline.journals import NOON_MS, Line, journal_of, log_of, read_to_the_end, rows_of, snapshot_of

LISTED, LINES = 1_000, 2_000


class Examiner:
    """Has snapshots judged, by Spark or without."""

    def __init__(self, spark: SparkSession | None) -> None:
        self._spark = spark

    def __call__(
        self,
        seen: Snapshot,
        journal: pa.Table,
        log: pa.Table,
        *,
        archive: Sequence[str] | None = None,
        newest: dict[int, int] | None = None,
        since: datetime | None = None,
        listed: int = LISTED,
    ) -> Audit:
        """Judge; `archive` are the ids that it has."""
        rows = None if archive is None else rows_of(archive)
        if self._spark is None:
            held = None if rows is None else InMemoryArchive("archive", "archive", rows, newest)
            return in_memory.examine(
                seen, journal, log, archive=held, since=since, listed=listed, lines=LINES
            )
        frames = [self._spark.createDataFrame(table) for table in (journal, log)]
        kept = (
            None if rows is None else Archive("archive", "archive", self._spark.createDataFrame(rows), newest)
        )
        return with_spark.examine(
            self._spark, seen, *frames, archive=kept, since=since, listed=listed, lines=LINES
        )


@pytest.fixture(scope="module")
def examine() -> Examiner:
    """Judges without Spark: that Spark says the same is for test_in_memory_audit.py."""
    return Examiner(None)


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
    # Made over a backlog: search had not settled 3 to 5 when billing began, so they were there.
    "owed by another when it began": Case(
        [
            ("subscribed", "search", "1"),
            FIVE,
            ("acked", "search", "1-2"),
            MADE,
            ("unsubscribed", "search", "3"),
            ("acked", "billing", "5"),
        ],
        6,
        [],
        6,
        ("1-3", "undelivered"),
        ("1-4", "undelivered"),
    ),
    "owed by another who had gone, or sought past it": Case(
        [
            ("subscribed", "search", "1"),
            ("subscribed", "gone", "1"),
            FIVE,
            ("unsubscribed", "gone", "1"),
            ("sought", "search", "5"),
            MADE,
            ("unsubscribed", "search", "5"),
            ("acked", "billing", "5"),
        ],
        6,
        [],
        6,
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


@pytest.fixture(scope="module", params=["plain", pytest.param("spark", marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> Audit:
    """All cases as the partitions of one topic, which takes as long as one of them."""
    examine = Examiner(request.getfixturevalue("spark") if request.param == "spark" else None)
    every = list(CASES.values())
    seen = snapshot_of([case.latest for case in every], billing=[case.billing for case in every])
    journal = journal_of({number: case.lines for number, case in enumerate(every)})
    log = log_of({number: case.log for number, case in enumerate(every)})
    return examine(read_to_the_end(seen, journal), journal, log)


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
    billing, _, search = cases.subscriptions
    assert billing.lost_by_reason == {"undelivered": 8, "unsettled": 1, "missing": 2, "passed_over": 4}
    assert (billing.backlog, billing.undelivered, billing.let_go, billing.not_owed) == (38, 36, 8, 5 + 2 + 4)
    assert billing.settled == 5 + 1 + 4 * 4 + 2 + 1_000_000
    assert (search.let_go, search.settled) == (2 + 2 + 3 + 5, 2 + 2)
    assert [message.key for message in cases.lost if message.reason == "passed_over"] == [
        "k4",
        "k1",
        "k2",
        "k3",
    ]
    assert any("billing: 8 messages lost: never delivered" in why for why in cases.why)


@pytest.mark.slow
def test_the_report_is_one_file_with_its_pictures(cases: Audit, tmp_path: Path) -> None:
    """And the same as JSON."""
    write_audit(cases, str(tmp_path), LocalFiles())
    page = (tmp_path / "audit.html").read_text()
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)  # which may happen to spell it
    assert page.count("data:image/png;base64,") == 5
    assert f"{NAMES.index('never delivered')}:1-4<" in page
    assert ">incomplete<" in page
    assert msgspec.json.decode((tmp_path / "audit.json").read_bytes(), type=Audit) == cases


def test_attempts_and_latencies_and_a_whole_archive(examine: Examiner) -> None:
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
    archive = [f"0:1-{entry}" for entry in range(1, 6)]
    journal = journal_of({0: lines})
    seen = read_to_the_end(snapshot_of([6], billing=[6], archive=[5]), journal)
    found = examine(seen, journal, log_of({0: [5]}), archive=archive, newest={0: 6})
    assert (found.verdict, found.unproven, found.messages, found.lost) == ("complete", 0, 5, [])
    kept, billing = found.subscriptions
    assert (kept.settled, kept.backlog) == (4, 1)
    assert (billing.messages, billing.settled, billing.duplicates, billing.deliveries) == (5, 5, 1, 6)
    assert billing.attempts == {"1": 4, "2": 1}
    assert billing.transitions == {"acked": 5, "delivered": 6, "nacked": 1, "subscribed": 1}
    _, acked, delivered = found.latency
    assert (delivered.what, delivered.messages, delivered.p50, delivered.max) == ("delivered", 5, 250, 250)
    assert (acked.what, acked.messages, acked.p50, acked.p99, acked.max) == ("acked", 5, 1_000, 6_000, 6_000)
    assert (found.span_ms, {line.at_ms for line in found.latency_over_time}) == (1_000, {NOON_MS + 3_000})
    assert found.archive is not None
    assert (found.archive.committed, found.archive.missing, found.archive.never_published) == (4, 0, 0)


def test_an_archive_is_held_against_the_journal(examine: Examiner) -> None:
    """What it lacks, what it has twice, and what never was; lists are cut, counts are not."""
    lines: list[Line] = [
        ("subscribed", "archive", "1"),
        ("published", "", "2:1-9"),
        ("committed", "archive", "1-6"),
    ]
    kept = ["0:2-1", "0:2-2", "0:2-2", "0:9-3", "0:2-5", "0:2-7", "0:2-11", "0:2-30", "4:1-1"]
    journal = journal_of({0: lines})
    seen = read_to_the_end(snapshot_of([10], archive=[7]), journal)
    found = examine(seen, journal, log_of({0: [7, 8, 9]}), archive=kept, newest={0: 20}, listed=2)
    checked = found.archive
    assert checked is not None
    assert found.verdict == "incomplete"
    assert (checked.rows, checked.messages, checked.duplicates, checked.committed) == (9, 8, 1, 6)
    assert checked.missing_ids == ["0:2-4", "0:2-6"]
    assert checked.never_published_ids == ["0:9-3", "0:2-30"]
    assert checked.duplicate_ids == ["0:2-2"]
    assert (checked.missing, checked.never_published, checked.newer, checked.unproven) == (2, 3, 1, 0)


@pytest.mark.parametrize("by", ["plain", pytest.param("spark", marks=pytest.mark.slow)])
def test_an_archive_may_have_an_earlier_topic_of_the_name(by: str, request: pytest.FixtureRequest) -> None:
    """Its rows are told by their ledgers: they stand for nothing that is missing, and are no failure."""
    examine = Examiner(request.getfixturevalue("spark") if by == "spark" else None)
    lines: list[Line] = [
        ("subscribed", "archive", "1"),
        ("published", "", "205:1-3"),
        ("committed", "archive", "1-3"),
    ]
    journal = journal_of({0: lines})
    seen = read_to_the_end(snapshot_of([4], archive=[4]), journal)
    seen = msgspec.structs.replace(seen, incarnation=200)
    earlier = ["0:90-1", "0:90-2", "0:90-3", "0:105-7", "1:105-1"]
    odd = ["0:206-1", f"0:{10**20}-1"]
    mine = ["0:205-1", "0:205-2", "0:205-3"]
    found = examine(seen, journal, log_of({}), archive=[*earlier, *mine], newest={0: 4})
    assert (found.verdict, found.why[1:]) == (
        "complete",
        ["the archive also has 5 messages of earlier topics of this name"],
    )
    assert found.archive is not None
    assert (found.archive.rows, found.archive.duplicates, found.archive.earlier) == (3, 0, 5)
    found = examine(seen, journal, log_of({}), archive=[*earlier, *mine[1:], *odd], newest={0: 4})
    assert found.archive is not None
    assert (found.verdict, found.archive.never_published) == ("incomplete", 2)
    found = examine(seen, journal, log_of({}), archive=[*earlier, *mine[1:]], newest={0: 4})
    assert found.archive is not None
    assert (found.verdict, found.archive.missing_ids) == ("incomplete", ["0:205-1"])


def test_an_archive_without_the_topic_names_those_it_has(tmp_path: Path) -> None:
    """Rather than an empty result."""
    (tmp_path / "topic=orders").mkdir()
    with pytest.raises(JobError, match=r"no archive of 'ordes' in .*; it has orders"):
        archive_folder(str(tmp_path), "ordes", LocalFiles())


Cover = Callable[..., PartitionCoverage]


@pytest.fixture
def covered(examine: Examiner) -> Cover:
    """Says what a journal covers of a partition."""

    def covered(
        lines: Sequence[Line], latest: int, first: int, cap: int = 9, since_ms: int = 0
    ) -> PartitionCoverage:
        journal = journal_of({0: lines}, first=first)
        seen = read_to_the_end(snapshot_of([latest], earliest=[first], journal=cap), journal)
        since = datetime.fromtimestamp(since_ms / 1_000, UTC) if since_ms else None
        [found] = examine(seen, journal, log_of({}), since=since).coverage
        return found

    return covered


def test_a_journal_without_its_beginning_proves_nothing_about_what_was_before(covered: Cover) -> None:
    """Nor one that was off for a while, or is."""
    later: list[Line] = [("acked", "billing", "90-99"), ("published", "", "101-105", 5_000)]
    found = covered(later, 106, 61)
    assert (found.proven_from, found.unproven, found.why) == (101, 100, "the journal begins at entry 101")
    # Nothing that is older than its oldest record can have been published since.
    assert [covered(later, 106, 61, since_ms=NOON_MS + after).unproven for after in (0, 1_000)] == [100, 0]

    hole: list[Line] = [MADE, FIVE, ("published", "", "9-10")]
    found = covered(hole, 11, 1)
    assert (found.proven_from, found.why) == (9, "the journal was off before entry 9")
    assert [covered(hole, 11, 1, since_ms=NOON_MS + after).unproven for after in (2_000, 3_000)] == [8, 0]

    for cap, latest in ((0, 6), (9, 9)):  # off; or on, but without what was published last
        found = covered([MADE, FIVE], latest, 1, cap)
        assert (found.proven_from, found.unproven) == (latest, latest - 1)
        assert "off" in found.why


def test_a_journal_that_was_switched_on_proves_what_came_since_also_where_nothing_did(
    covered: Cover,
) -> None:
    """Of an idle partition it knows since when."""
    idle: list[Line] = [("begun", "", "8")]
    assert covered(idle, 8, 5).unproven == 7
    assert covered(idle, 8, 5, since_ms=NOON_MS + 999).unproven == 7
    assert covered(idle, 8, 5, since_ms=NOON_MS + 1_000).unproven == 0


ALL_DONE: list[Line] = [MADE, FIVE, DELIVERED, ACKED, ("published", "", "6-7"), ("acked", "billing", "6-7")]


@pytest.mark.parametrize(
    ("gone", "unproven", "why"),
    [
        ([3, 4], 5, "records 3 to 4 of the journal are gone"),
        ([4], 5, "record 4 of the journal is gone"),
        ([6], 7, "record 6 of the journal is gone"),
        ([1, 6], 7, "record 6 of the journal is gone"),
        ([1, 2, 3, 4, 5, 6], 7, "records 1 to 6 of the journal are gone"),
        ([2, 5], 7, "record 5 of the journal is gone"),
    ],
)
def test_records_that_somebody_deleted_make_it_unproven_and_nothing_lost(
    examine: Examiner, gone: list[int], unproven: int, why: str
) -> None:
    """Numbers are consecutive, and the last one is known; what was before a hole does not count."""
    whole = journal_of({0: ALL_DONE})
    seen = read_to_the_end(snapshot_of([8], billing=[8]), whole)
    assert examine(seen, whole, log_of({0: []})).verdict == "complete"
    left = whole.filter(pa.array([offset not in gone for offset in whole.column("offset").to_pylist()]))
    found = examine(seen, left, log_of({0: []}))
    assert (found.verdict, found.lost) == ("unproven", [])
    assert [(part.unproven, part.why) for part in found.coverage] == [(unproven, why)]


def test_a_message_in_the_backlog_without_its_body_is_lost(examine: Examiner) -> None:
    """One that is settled, let go, or newer than the first look is not."""
    lines: list[Line] = [
        MADE,
        ("subscribed", "search", "1"),
        FIVE,
        ("acked", "billing", "2"),
        ("delivered", "billing", "3"),
        ("unsubscribed", "search", "1"),
        ("published", "", "6-7"),
    ]
    journal = journal_of({0: lines})
    seen = read_to_the_end(snapshot_of([6], billing=[1]), journal)
    gone = BodiesState(there=7, checked=7, missing={0: [(2, 3), (5, 7)]})
    found = examine(msgspec.structs.replace(seen, bodies=gone), journal, log_of({0: range(1, 8)}))
    assert ids(found) == [("0:1-3", "no_body"), ("0:1-5", "no_body")]
    assert [message.key for message in found.lost] == ["k3", "k5"]
    assert found.bodies is not None
    assert (found.bodies.missing, found.verdict) == (5, "incomplete")
    assert found.why == ["billing: 2 messages lost: in the log, but its body is not in the payload store"]
    unseen = examine(msgspec.structs.replace(seen, bodies=None), journal, log_of({0: range(1, 8)}))
    assert (unseen.verdict, unseen.why[1:]) == ("complete", ["bodies not checked"])


def test_what_is_judged_is_what_is_proven_since_a_time(examine: Examiner) -> None:
    """Entries whose publish is not known, or is older than asked for, are not judged."""
    lines: list[Line] = [("published", "", "101-105", 5_000), ("published", "", "106-107", 5_000)]
    journal = journal_of({0: lines}, first=61)
    seen = read_to_the_end(snapshot_of([108], earliest=[61], billing=[1]), journal)
    since = datetime.fromtimestamp(NOON_MS / 1_000 + 7, UTC)
    found = examine(seen, journal, log_of({0: [100]}), since=since)
    assert ids(found) == [("0:1-106", "undelivered"), ("0:1-107", "undelivered")]
    assert (found.verdict, found.messages, found.unproven) == ("incomplete", 2, 0)
