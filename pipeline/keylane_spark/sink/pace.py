"""Rows that wait for their time: a column says how many seconds after the start of the task each is due."""

from collections.abc import Iterator
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import numpy as np

DUE = "_due"
_STEP = 0.1  # seconds: rows that are due within the same go together


def paced(batches: Iterator[Any]) -> Iterator[Any]:
    """Parts of record batches, whose rows are in the order of `_due`, each when it is due."""
    began = monotonic()
    for batch in batches:
        steps = np.floor(batch.column(DUE).to_numpy() / _STEP)
        cuts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), batch.num_rows]
        rows = batch.drop_columns([DUE])
        for start, end in pairwise(cuts):
            if start < end:
                sleep(max(0.0, began + steps[start] * _STEP - monotonic()))
                yield rows.slice(start, end - start)
