"""Numbers as people write them."""

__all__ = ["count_of"]


def count_of(number: int, noun: str) -> str:
    """A number of things.

    >>> count_of(1, "batch"), count_of(2_000, "row")
    ('1 batch', '2,000 rows')
    """
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
