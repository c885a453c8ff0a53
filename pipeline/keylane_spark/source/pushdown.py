"""What filters of a query say about where to read: topics, partitions, offsets and times of publishing."""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

_PLANNER = "pyspark.sql.worker.data_source_pushdown_filters"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEAR = 500  # messages that are read along with others rather than left out
_FAR = 2**63
_MOST = 1_000  # ranges that one filter makes
_EVERYWHERE = ("topic", "partition")  # columns that are the same in all rows of a partition
_KINDS: dict[str, type] = {"topic": str, "partition": int, "offset": int, "timestamp": datetime}
_COMPARE: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, among: value in among,
}


class Span(NamedTuple):
    """Whole numbers from `start` up to, but without, `end`."""

    start: int
    end: int


def filters_come() -> bool:
    """Whether this is the process in which Spark hands filters to a reader.

    It is there only with spark.sql.python.filterPushdown.enabled; elsewhere Spark refuses a reader that
    takes filters, so without the setting there must be none.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PLANNER in sys.modules or getattr(main, "name", None) == _PLANNER


class Narrowing:
    """Where the rows are that filters leave; without any it is everywhere."""

    def __init__(self, *, times: bool) -> None:
        self._times = times  # whether they never go back in a partition
        self._taken: dict[str, list[Filter]] = {name: [] for name in _KINDS}

    def take(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Go by these filters; those come back that rows have to be held against all the same."""
        for one in filters:
            column = _column(one)
            if isinstance(one, IsNotNull) and column in _KINDS:
                continue  # they never are null
            if column is None or (column == "timestamp" and not self._times):
                yield one
                continue
            self._taken[column].append(one)
            if not _exact(column, one):
                yield one

    def has(self, topic: str, partition: int) -> bool:
        """Whether there are rows in a partition, as far as its number and topic tell."""
        return all(_holds(one, topic) for one in self._taken["topic"]) and all(
            _holds(one, partition) for one in self._taken["partition"]
        )

    def offsets(self, start: int, end: int) -> list[Span]:
        """What to read of a range."""
        return _between(start, end, map(spans, self._taken["offset"]))

    def times(self) -> Span | None:
        """The milliseconds since 1970 from the first time of publishing up to, but without, the end of it."""
        if not self._taken["timestamp"]:
            return None
        found = _between(0, _FAR, map(_milliseconds, self._taken["timestamp"]))
        return Span(found[0].start, found[-1].end) if found else Span(0, 0)


def spans(one: Filter) -> list[Span]:
    """The whole numbers that a comparison leaves, in order; of a list also what is between near ones."""
    match one:
        case EqualTo(value=number) | EqualNullSafe(value=number):
            return [Span(number, number + 1)]
        case GreaterThan(value=number):
            return [Span(number + 1, _FAR)]
        case GreaterThanOrEqual(value=number):
            return [Span(number, _FAR)]
        case LessThan(value=number):
            return [Span(-_FAR, number)]
        case LessThanOrEqual(value=number):
            return [Span(-_FAR, number + 1)]
        case In(value=numbers):
            return _runs(sorted(number for number in numbers if number is not None))
    raise AssertionError(one)


def _milliseconds(one: Filter) -> list[Span]:
    """The same of a time: rows have times of whole milliseconds, and filters of microseconds."""
    if isinstance(one, In):
        moments = sorted(moment for moment in one.value if moment is not None)
        return [Span(_first(moments[0]), _first(moments[-1]) + 1)] if moments else []
    first = _first(one.value)  # type: ignore[attr-defined]  # of a comparison
    whole = _since(one.value) % 1_000 == 0  # type: ignore[attr-defined]
    match one:
        case GreaterThanOrEqual():
            return [Span(first, _FAR)]
        case GreaterThan():
            return [Span(first + whole, _FAR)]
        case LessThan():
            return [Span(-_FAR, first)]
        case LessThanOrEqual():
            return [Span(-_FAR, first + whole)]
    return [Span(first, first + whole)]


def _since(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _first(moment: datetime) -> int:
    """The first millisecond that is not before a moment."""
    return -(-_since(moment) // 1_000)


def _column(one: Filter) -> str | None:
    """The column that a filter is about, if that tells where to read and is compared with what fits."""
    if isinstance(one, Not):
        column = _column(one.child)
        # Nothing is not in a list that has a null.
        unknown = isinstance(one.child, In) and None in one.child.value
        return column if column in _EVERYWHERE and type(one.child) in _COMPARE and not unknown else None
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    name = attribute[0] if len(attribute) == 1 and attribute[0] in _KINDS else None
    if name is None or isinstance(one, IsNotNull):
        return name
    if type(one) not in _COMPARE:
        return None
    value = one.value  # type: ignore[attr-defined]  # of a comparison
    given = [each for each in value if each is not None] if isinstance(one, In) else [value]
    return name if all(_fits(each, _KINDS[name]) for each in given) else None


def _fits(value: object, kind: type) -> bool:
    if kind is datetime:
        return isinstance(value, datetime) and value.tzinfo is not None
    return isinstance(value, kind) and not isinstance(value, bool)


def _exact(column: str, one: Filter) -> bool:
    """Whether no row is read that a filter leaves out."""
    return column in _EVERYWHERE or (column == "offset" and not isinstance(one, In))


def _holds(one: Filter, value: object) -> bool:
    if isinstance(one, Not):
        return not _holds(one.child, value)
    return _COMPARE[type(one)](value, one.value)  # type: ignore[attr-defined]  # of a comparison


def _runs(numbers: Sequence[int]) -> list[Span]:
    """Numbers in order, those together that are near one another."""
    if not numbers:
        return []
    cuts = [at for at, (one, next_) in enumerate(pairwise(numbers), 1) if next_ - one > _NEAR]
    if len(cuts) >= _MOST:
        cuts = []
    ends = pairwise([0, *cuts, len(numbers)])
    return [Span(numbers[first], numbers[stop - 1] + 1) for first, stop in ends]


def _between(start: int, end: int, all_spans: Iterable[list[Span]]) -> list[Span]:
    """What all of them and a range have in common."""
    left = [Span(start, end)] if start < end else []
    for some in all_spans:
        both = (Span(max(a.start, b.start), min(a.end, b.end)) for a in left for b in some)
        left = [span for span in both if span.start < span.end]
    return left
