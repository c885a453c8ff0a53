"""Ledgers: `<ledger>:<first entry> …`, oldest first, says which ledger each entry of a partition is of."""

from bisect import bisect_right
from collections.abc import Callable, Iterable


def parse_ledgers(text: str) -> tuple[list[str], list[int]]:
    """Return the numbers of ledgers, as text, and their first entries."""
    items = [item.partition(":") for item in text.split()]
    return [ledger for ledger, _, _ in items], [int(first) for _, _, first in items]


def id_maker(ledgers: str) -> Callable[[int], str]:
    """Return what makes an id, `<ledger>-<entry>`, of an entry's number.

    >>> id_of = id_maker("1794803456029:1 1794803456030:8")
    >>> id_of(7), id_of(8)
    ('1794803456029-7', '1794803456030-8')
    """
    names, starts = parse_ledgers(ledgers)
    if len(names) == 1:
        return f"{names[0]}-{{}}".format

    def id_of(entry: int) -> str:
        return f"{names[max(bisect_right(starts, entry) - 1, 0)]}-{entry}"

    return id_of


def ledgers_between(ledgers: str, first: int, last: int) -> str:
    """Return those ledgers that entries from `first` to `last` can be of; one at least, if there is any."""
    _, starts = parse_ledgers(ledgers)
    at = max(bisect_right(starts, first) - 1, 0)
    return " ".join(ledgers.split()[at : max(bisect_right(starts, last), at + 1)])


def merge_ledgers(texts: Iterable[str]) -> str:
    """Return the ledgers of several answers, oldest first."""
    items = {item for text in texts for item in text.split()}
    return " ".join(sorted(items, key=lambda item: int(item.partition(":")[2])))
