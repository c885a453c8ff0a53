"""What Redis has answered to XRANGE as Arrow columns, of which nothing is made for each line in Python."""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keylane.errors import ProtocolError
from keylane.wire import lines

_LINE = 4  # texts of a line before its fields: `*2`, the length of its id, its id, `*` and how many follow
_FIELD = 4  # and of each field: the length of its name, its name, the length of its value, its value
_CR = 13

Column = Callable[[int], pa.StringArray]  # 0 is that of the ids, then come those of the fields


class Lines:
    """The lines of some answers; a column is made when it is asked for."""

    def __init__(self, answers: Sequence[bytes], fields: int) -> None:
        self._parts = [_split(answer, fields) or _parsed(answer, fields) for answer in answers]

    def entries(self) -> pa.Int64Array:
        """What is behind the `-` of each id; it only grows, so without holes the first and last tell all."""
        ids = self.column(0)
        if not len(ids):
            return pa.array([], pa.int64())
        first, last = (int(ids[at].as_py().partition("-")[2]) for at in (0, -1))
        if last - first == len(ids) - 1:
            return pa.arange(first, last + 1)
        return pc.list_element(pc.split_pattern(ids, "-", max_splits=1), 1).cast(pa.int64())

    def column(self, at: int) -> pa.StringArray:
        """The ids, or from 1 on the values of a field."""
        return pa.concat_arrays([pa.array([], pa.string()), *(column(at) for column in self._parts)])


def ranges_of(entries: pa.Int64Array) -> list[int]:
    """The first and last entry of each stretch without a hole, flat."""
    if not len(entries):
        return []
    holes = pc.indices_nonzero(pc.not_equal(pc.subtract(entries[1:], entries[:-1]), 1)).cast(pa.int64())
    firsts = [entries[0].as_py(), *entries.take(pc.add(holes, 1)).to_pylist()]
    lasts = [*entries.take(holes).to_pylist(), entries[-1].as_py()]
    return [entry for both in zip(firsts, lasts, strict=True) for entry in both]


def _split(answer: bytes, fields: int) -> Column | None:
    """The columns, if the only ends of texts are those that belong there: then these tell all."""
    count, width = lines.count(answer), _LINE + _FIELD * fields
    ends = np.flatnonzero(np.frombuffer(answer, np.uint8) == _CR)
    if len(ends) != 1 + width * count or len(answer) > np.iinfo(np.int32).max:
        return None
    cuts = np.zeros(2 * len(ends) + 1, np.int32)  # texts, and what is between them, in turn
    cuts[1::2] = ends
    cuts[2::2] = ends + 2
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(answer)]
    texts = pa.Array.from_buffers(pa.binary(), 2 * len(ends), buffers)

    def column(at: int) -> pa.StringArray:
        first = 1 + (_LINE + _FIELD * at - 1 if at else 2)
        return texts.take(pa.arange(2 * first, len(texts), 2 * width)).cast(pa.string())

    return column


def _parsed(answer: bytes, fields: int) -> Column:
    found = lines.parse(answer)
    if any(len(line[1]) != 2 * fields for line in found):
        raise ProtocolError(f"lines of a stream that have not {fields} fields each")
    return lambda at: pa.array([line[1][2 * at - 1] if at else line[0] for line in found], pa.string())
