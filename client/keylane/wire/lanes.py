"""Lanes as receipts name them: "" where there is no order, "=" for a whole partition, "=" and the key."""

from collections.abc import Iterable

UNORDERED = ""
WHOLE_PARTITION = "="


def lane_of_mode(mode: str) -> str:
    """Return the one lane of a subscription whose lanes are not those of keys."""
    return UNORDERED if mode == "shared" else WHOLE_PARTITION


def lanes_of_keys(keys: Iterable[str]) -> list[str]:
    """Return the lane of each key in mode key_shared; messages without a key have no order."""
    return ["=" + key if key else "" for key in keys]
