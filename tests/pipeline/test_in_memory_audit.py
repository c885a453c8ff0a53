"""The audit without Spark says of every message what the simplest audit says, and all that Spark's says."""

import random
from collections import Counter
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.in_memory import audit as in_memory
from keylane_spark.auditing.in_memory.archive_check import InMemoryArchive
from keylane_spark.auditing.in_memory.audit import Examination
from keylane_spark.auditing.rules import trust_of
from keylane_spark.auditing.with_spark import engine as with_spark
from keylane_spark.auditing.with_spark.archive_check import Archive
from keylane_spark.auditing.with_spark.lives import numbers_in
from keylane_spark.snapshot import BodiesState, PartitionState, Snapshot
from tests.pipeline.journals import rows_of, tables_of
from tests.pipeline.reference_audit import judge_plainly
from tests.pipeline.simulation import Look, Partition

PARTITIONS = 400


def looks_at(count: int, *, thief: bool) -> list[Look]:
    """Random partitions with subscriptions that come, go, seek and share."""
    looks = []
    for seed in range(count):
        luck = random.Random(seed)
        looks.append(Partition(luck, thief=thief).live(luck.randint(10, 120)))
    return looks


def judged_by(seen: Snapshot, journal: pa.Table, log: pa.Table) -> Counter[tuple[int, str, int, str, int]]:
    """How many (partition, subscription, entry, state, deliveries) there are."""
    found: Counter[tuple[int, str, int, str, int]] = Counter()
    for life, of in Examination(seen, journal, log, None, 0).judged():
        for first, last, state, delivered in zip(of.first, of.last, of.state, of.delivered, strict=True):
            for entry in range(first, last + 1):
                found[life.partition, life.subscription, entry, str(state), int(delivered)] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("thief", [False, True], ids=["honest", "robbed"])
def test_it_says_of_every_message_what_the_simplest_audit_says(thief: bool) -> None:
    looks = looks_at(PARTITIONS, thief=thief)
    expected = Counter(
        {
            (number, *key): count
            for number, look in enumerate(looks)
            for key, count in judge_plainly(look).items()
        }
    )
    found = judged_by(*tables_of(looks))
    assert found - expected == Counter()
    assert expected - found == Counter()
    assert len(expected) > 8_000


def without(journal: pa.Table, luck: random.Random, share: float) -> pa.Table:
    """A journal from which somebody has deleted records."""
    records = sorted(
        set(zip(journal.column("partition").to_pylist(), journal.column("offset").to_pylist(), strict=True))
    )
    gone = {record for record in records if luck.random() < share}
    pairs = zip(journal.column("partition").to_pylist(), journal.column("offset").to_pylist(), strict=True)
    return journal.filter(pa.array([pair not in gone for pair in pairs]))


def judge(seen: Snapshot, journal: pa.Table, log: pa.Table) -> Audit:
    """All of it, without an archive."""
    return in_memory.examine(seen, journal, log, listed=1_000, lines=2_000)


@pytest.mark.slow
def test_records_that_are_gone_never_make_a_message_lost() -> None:
    """Of honest partitions nothing is called lost, whichever records are missing: it is unproven."""
    unproven = 0
    for seed in range(30):
        luck = random.Random(seed)
        seen, journal, log = tables_of(looks_at(20, thief=False))
        found = judge(seen, without(journal, luck, luck.choice([0.01, 0.1, 0.5])), log)
        assert found.lost == [], seed
        unproven += sum("gone" in part.why for part in found.coverage)
    assert unproven > 100


@pytest.mark.parametrize(
    ("there", "start", "missing"),
    [
        ([(5, 20)], 5, ""),
        ([(3, 20)], 5, ""),  # trimmed while it was read
        ([(5, 8), (10, 20)], 10, "record 9"),
        ([(5, 6), (8, 8), (11, 20)], 11, "records 9 to 10"),
        ([(7, 20)], 7, "records 5 to 6"),
        ([(2, 3), (7, 20)], 7, "records 5 to 6"),
        ([(5, 19)], 21, "record 20"),
        ([], 21, "records 5 to 20"),
    ],
)
def test_a_journal_counts_from_its_last_hole_on(
    there: list[tuple[int, int]], start: int, missing: str
) -> None:
    state = PartitionState(0, 1, 9, 5, 15, 21)
    assert trust_of(state, there) == (start, missing)


@pytest.mark.parametrize(("earliest", "end"), [(1, 1), (21, 21), (30, 21)])
def test_a_journal_of_which_nothing_is_left_misses_nothing(earliest: int, end: int) -> None:
    assert trust_of(PartitionState(0, 1, 9, earliest, 15, end), []).missing == ""


def variant(
    number: int, thief: bool
) -> tuple[Snapshot, pa.Table, pa.Table, InMemoryArchive | None, datetime | None]:
    """A snapshot of many partitions with more or less on top."""
    luck = random.Random(number)
    looks = looks_at(60, thief=thief)
    seen, journal, log = tables_of(looks)
    since, archive = None, None
    if number % 2:
        journal = without(journal, luck, 0.02)
        gone = {p: [(e, e) for e in sorted(look.log) if luck.random() < 0.2] for p, look in enumerate(looks)}
        seen = msgspec.structs.replace(seen, bodies=BodiesState(90, 80, gone))
    if number % 3 == 1:
        at = sorted(journal.column("timestamp").to_pylist())[len(journal) // 3]
        since = at.astimezone(UTC)
    if number % 3 == 2:
        kept = [
            f"{p}:{record.by}-{entry}"
            for p, look in enumerate(looks)
            for record in look.records
            if record.what == "published"
            for first, last in record.ranges
            for entry in range(first, (last or first) + 1)
            if luck.random() < 0.8
        ]
        kept += [*luck.sample(kept, 20), "0:9-1", "3:1-900", "70:1-1", "2:1-0", "5:0-3", "80:0-3"]
        seen = msgspec.structs.replace(seen, incarnation=1)
        newest = {p: look.latest for p, look in enumerate(looks)} if number > 2 else None
        archive = InMemoryArchive("archive", "a", rows_of(kept), newest)
    return seen, journal, log, archive, since


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_it_says_all_that_the_job_on_spark_says(spark: SparkSession, number: int) -> None:
    """Counts, lists, latencies, coverage and sentences, with records, bodies and an archive amiss."""
    seen, journal, log, archive, since = variant(number, thief=number in (2, 3, 4))
    plain = in_memory.examine(seen, journal, log, archive=archive, since=since, listed=300, lines=40)
    kept = None
    if archive is not None:
        rows = spark.createDataFrame(archive.rows)
        kept = Archive(archive.path, archive.subscription, rows, archive.newest)
    frames = [spark.createDataFrame(table) for table in (journal, log)]
    by_spark = with_spark.examine(spark, seen, *frames, archive=kept, since=since, listed=300, lines=40)
    for name in Audit.__struct_fields__:
        assert getattr(plain, name) == getattr(by_spark, name), name


@pytest.mark.slow
def test_spark_finds_the_records_that_are_there(spark: SparkSession) -> None:
    """The last ranges of their numbers, however they lie to the words that it counts by."""
    luck = random.Random(7)
    numbers: dict[int, list[int]] = {}
    for partition in range(60):
        first = luck.randint(1, 400)
        some = set(range(first, first + luck.choice([1, 5, 63, 64, 126, 300, 700])))
        for _ in range(luck.choice([0, 0, 1, 2, 6])):
            at = luck.choice([luck.randint(1, 1_000), luck.randint(1, 15) * 63 - luck.randint(0, 1)])
            some -= set(range(at, at + luck.choice([1, 1, 2, 63, 130])))
        numbers[partition] = sorted(some)
    rows = [(partition, number) for partition, there in numbers.items() for number in there for _ in "12"]
    luck.shuffle(rows)
    found = numbers_in(spark.createDataFrame(rows, "partition int, offset long"))
    for partition, there in numbers.items():
        ranges: list[tuple[int, int]] = []
        for number in there:
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        told = found.get(partition, [])
        assert told[-1:] == ranges[-1:], partition
        assert [last for _, last in told[-2:-1]] == [last for _, last in ranges[-2:-1]], partition
