"""Frames that stand for several, PUBLISHES and ACKS: whether their parts fit together."""

from collections.abc import Sized

from keylane import wire
from keylane.errors import InvalidArgument, ProtocolError


def check_parts(sequence: int, names: str, *columns: Sized) -> None:
    """Raise an error unless lists have an item for each part of a frame, of which there may be so many."""
    counts = {len(column) for column in columns}
    if sequence + max(counts) > 2**64:
        raise ProtocolError(f"sequence {sequence} is too high: no sequences are left for all parts")
    if len(counts) > 1 or not 1 <= min(counts) <= wire.MAX_BATCH:
        raise ProtocolError(f"{names} have an item for each part, 1 to {wire.MAX_BATCH}")


def check_sizes(sizes: list[int], count: int) -> None:
    """Raise an error unless parts of these sizes are as much as there is."""
    if min(sizes) < 1 or sum(sizes) != count:
        raise InvalidArgument(
            f"the sizes of the parts add up to {sum(sizes)}, but there are {count}; no part may be empty"
        )
