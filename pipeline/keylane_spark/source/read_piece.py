"""What one Spark task reads: ranges of partitions, page by page, on an executor."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from keylane.types import Page, RawPage
from keylane.wire.ledgers import parse_ledgers
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.arrow import Messages
from keylane_spark.source.arrow_journal import journal_batch
from keylane_spark.source.arrow_lines import ranges_of
from keylane_spark.source.data_loss import few, gaps, report, some
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.piece import Piece, Share

P = TypeVar("P", Page, RawPage)

_PAGE = 5_000  # messages
_BODIES = 16 * 1024 * 1024  # bytes of bodies in one batch, of which three are in memory


def read_share(options: ReadOptions, columns: StructType, share: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a share as Arrow batches; of the next page the reading begins before they are asked for."""
    if not isinstance(share, Share):  # Spark's stand-in where there is nothing to read
        return
    schema = to_arrow_schema(columns, timezone="UTC")
    with BackgroundClient(options.connection) as remote:
        if options.journal:
            yield from _records(remote, options, schema, share.pieces)
        else:
            yield from _batches(remote, options, schema, share.pieces)


def _pages(
    remote: BackgroundClient, options: ReadOptions, pieces: list[Piece], read: Callable[..., Awaitable[P]]
) -> Iterator[tuple[Piece, int, P]]:
    """The pages of pieces one after the other, with where each starts; the next one is always under way."""

    def ask(piece: Piece, start: int) -> "Future[P]":
        what = piece.range
        return remote.start(
            read, what.topic, what.partition, start, what.end, limit=_PAGE, incarnation=piece.incarnation
        )

    left = deque((piece, piece.range.start) for piece in pieces if piece.range.size)
    coming = ask(*left[0]) if left else None
    while coming is not None:
        page = coming.result()
        piece, start = left.popleft()
        if page.next < piece.range.end:
            left.appendleft((piece, page.next))
        coming = ask(*left[0]) if left else None
        if piece.ledger:
            _check_ledgers(options, piece, page.ledgers, page.next)
        yield piece, start, page


def _check_ledgers(options: ReadOptions, piece: Piece, ledgers: str, end: int) -> None:
    """What was given since it was planned is not what was planned: the server has lost that."""
    items = zip(*parse_ledgers(ledgers), strict=True)
    anew = [first for ledger, first in items if int(ledger) > piece.ledger]
    if anew and anew[0] < end:
        report(
            options.fail_on_data_loss,
            f"the server has lost what it had written last: the messages of topic {piece.range.topic!r}, "
            f"partition {piece.range.partition} from offset {anew[0]} on are others than when the batch was "
            "planned",
        )


def _check(options: ReadOptions, piece: Piece, ranges: list[int], start: int, end: int) -> None:
    """Report what is missing of entries that have to be there."""
    missing = gaps(ranges, max(start, piece.dense), end) if end > piece.dense else []
    if missing:
        count = sum(last - first + 1 for first, last in missing)
        what = "records of the journal" if options.journal else "messages"
        report(
            options.fail_on_data_loss,
            f"{count} {what} of topic {piece.range.topic!r}, partition {piece.range.partition} are gone: "
            f"offsets {some(missing)}",
        )


def _records(
    remote: BackgroundClient, options: ReadOptions, schema: pa.Schema, pieces: list[Piece]
) -> Iterator[pa.RecordBatch]:
    """Records of the journal."""
    for piece, start, page in _pages(remote, options, pieces, partial(remote.client.read, journal=True)):
        _check(options, piece, page.ranges, start, page.next)
        if page.ranges:
            yield journal_batch(schema, piece.range.topic, piece.range.partition, page)


def _batches(
    remote: BackgroundClient, options: ReadOptions, schema: pa.Schema, pieces: list[Piece]
) -> Iterator[pa.RecordBatch]:
    """Messages with their bodies, which are fetched while the page before is converted."""
    waiting: deque[tuple[Messages, Future[list[bytes | None]]]] = deque()
    for piece, start, page in _pages(remote, options, pieces, remote.client.read_raw):
        messages = Messages(piece.range.topic, piece.range.partition, page)
        _check(options, piece, ranges_of(messages.entries), start, page.next)
        if not len(messages):
            continue
        if "value" not in schema.names:
            yield messages.batch(schema, None)
            continue
        for part in messages.cut(_BODIES):
            waiting.append((part, remote.start(remote.client.bodies, part.topic, part.names())))
            if len(waiting) > 1:
                yield _with_bodies(options, schema, *waiting.popleft())
    while waiting:
        yield _with_bodies(options, schema, *waiting.popleft())


def _with_bodies(
    options: ReadOptions, schema: pa.Schema, messages: Messages, bodies: "Future[list[bytes | None]]"
) -> pa.RecordBatch:
    values = messages.values(bodies.result())
    if values.null_count:
        ids = messages.ids().filter(values.is_null()).to_pylist()
        report(
            options.fail_on_data_loss,
            f"the payload store has no body for {len(ids)} messages of topic {messages.topic!r}: {few(ids)}",
        )
    return messages.batch(schema, values)
