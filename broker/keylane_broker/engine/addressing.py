"""Messages that are meant for one subscription alone: those that were redriven to it."""

from collections.abc import Sequence

import msgspec

from keylane.wire import REDRIVEN

_MARK = f'"{REDRIVEN}":"'  # as it stands in `about`
_attributes = msgspec.json.Decoder(dict[str, str]).decode
_json = msgspec.json.Encoder().encode


def addressed_to_others(subscription: str, abouts: Sequence[str]) -> list[int]:
    """Return the places of messages that are meant for another subscription."""
    if _MARK not in "".join(abouts):  # as mostly
        return []
    return [
        place
        for place, about in enumerate(abouts)
        if _MARK in about
        and (_attributes_in(about.split(" ", 4)[4:]).get(REDRIVEN) or subscription) != subscription
    ]


def _attributes_in(fields: list[str]) -> dict[str, str]:
    """Return attributes, none where their text is not one, or says nothing of this: other fields may."""
    if not fields or _MARK not in fields[0]:
        return {}
    try:
        return _attributes(fields[0])
    except msgspec.MsgspecError:
        return {}


def take_out_addresses(flat: list[str]) -> None:
    """Take out of messages, as producers send them, for whom they are: only a redrive says that.

    Whoever passes on a message that was redriven passes on its attributes.
    """
    for place in range(2, len(flat), 3):
        if _MARK in flat[place]:
            *said, text = flat[place].split(" ", 3)
            if attributes := _attributes_in([text]):
                attributes.pop(REDRIVEN, None)
                flat[place] = " ".join((*said, _json(attributes).decode() if attributes else ""))
