"""Numbers of journal records that were given again: the server has lost the records that had them.

A journal tells in which ledger it was written: `moved` begins one, and `published` says its own. They grow.
"""

from collections.abc import Iterator

from keylane.types import PartitionOffsets
from keylane_spark.background_client import BackgroundClient

_LOOK = 500  # records that are asked for at once: what was published last is not far


def first_rewritten(remote: BackgroundClient, topic: str, said: PartitionOffsets, at: int, known: int) -> int:
    """The first record before `at` that was written in a later ledger than the one known, 0 for none."""
    found = 0
    for number, ledger in _backwards(remote, topic, said, at):
        if ledger <= known:
            return found
        found = number
    return said.journal_earliest if found else 0


def _backwards(
    remote: BackgroundClient, topic: str, said: PartitionOffsets, end: int
) -> Iterator[tuple[int, int]]:
    """Records before `end` that tell their ledger, the last one first."""
    while end > said.journal_earliest:
        start = max(said.journal_earliest, end - _LOOK)
        yield from reversed(list(_ledgers(remote, topic, said, start, end)))
        end = start


def _ledgers(
    remote: BackgroundClient, topic: str, said: PartitionOffsets, start: int, end: int
) -> Iterator[tuple[int, int]]:
    """Those between two numbers."""
    while start < end:
        page = remote.call(
            remote.client.read,
            topic,
            said.partition,
            start,
            end,
            limit=_LOOK,
            journal=True,
            incarnation=said.incarnation,
        )
        pairs = zip(page.ranges[::2], page.ranges[1::2], strict=True)
        numbers = [number for first, last in pairs for number in range(first, last + 1)]
        for number, what, by in zip(numbers, page.flat[1::5], page.flat[3::5], strict=True):
            if what in ("moved", "published"):
                yield number, int(by.rpartition(" ")[2])
        start = page.next
