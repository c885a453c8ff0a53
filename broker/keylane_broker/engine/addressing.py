"""Messages that are meant for one subscription alone: those that were redriven to it."""

from collections.abc import Sequence

import msgspec

REDRIVEN = "redriven.for"  # the attribute that names the subscription
_MARK = f'"{REDRIVEN}":"'  # as it stands in `about`
_attributes = msgspec.json.Decoder(dict[str, str]).decode


def addressed_to_others(subscription: str, abouts: Sequence[str]) -> list[int]:
    """Return the places of messages that are meant for another subscription."""
    if _MARK not in "".join(abouts):  # as mostly
        return []
    return [
        place
        for place, about in enumerate(abouts)
        if _MARK in about and _attributes(about.split(" ", 4)[4]).get(REDRIVEN) != subscription
    ]
