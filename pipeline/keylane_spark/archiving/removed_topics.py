"""Topics that are taken out of an archive: the broker hears once more how far it got with them.

The broker is told of a batch when the next one begins, or at the end of a run; after a crash it is behind.
The checkpoint forgets topics that are taken out, so should they come back, the subscription says where to go
on: if that were behind, rows would be archived twice.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from keylane.errors import SubscriptionBusy, SubscriptionMoved, SubscriptionNotFound, TopicNotFound
from keylane_spark.errors import DataLoss
from keylane_spark.files import Files
from keylane_spark.source.checkpoint_format import load
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.query import Query

_OTHERS = (TopicNotFound, SubscriptionNotFound, SubscriptionMoved, SubscriptionBusy, DataLoss)


def done_of(files: Files, checkpoint: str, added: Callable[[int], bool]) -> dict[str, Any]:
    """How far the batches that are done reach, as the checkpoint has it; nothing before the first.

    The last one may be added to the archive and not be done for Spark.
    """
    begun = _numbers(files, f"{checkpoint}/offsets")
    if not begun:
        return {}
    last = max(begun)
    if last not in _numbers(files, f"{checkpoint}/commits") and not added(last):
        last -= 1
    offset = _offsets_of(files, checkpoint, last)
    return dict(json.loads(offset[0])) if offset else {}


def plan_of(files: Files, checkpoint: str, batch: int) -> str:
    """Where a batch begins and ends, as the checkpoint has it: another plan is of other rows."""
    end = _offsets_of(files, checkpoint, batch)
    return "\n".join([*_offsets_of(files, checkpoint, batch - 1), *end]) if end else ""


def leave(given: Mapping[str, str], offset: Mapping[str, Any]) -> list[str]:
    """Drain what was read of topics that the options of a query no longer have; the names of these topics."""
    kept = ReadOptions.parse(given, streaming=True).topics
    positions, of = load(offset)
    left = sorted(positions.keys() - kept)
    for topic in left:
        query = Query(
            ReadOptions.parse({**given, "subscribe": topic, "failOnDataLoss": "true"}, streaming=True)
        )
        try:
            start = {topic: positions[topic]}
            query.resume(start, of)
            query.commit(start, of, wait=True)
        except _OTHERS:
            pass  # it is not where we left it, or another one by now: its own position counts
        finally:
            query.close()
    return left


def _offsets_of(files: Files, checkpoint: str, batch: int) -> list[str]:
    """The end of a batch; nothing if the checkpoint does not have it."""
    text = files.read(f"{checkpoint}/offsets/{batch}") or ""
    return text.splitlines()[2:]  # behind version and settings


def _numbers(files: Files, folder: str) -> set[int]:
    return {int(entry.name) for entry in files.entries(folder) if entry.name.isdigit()}
