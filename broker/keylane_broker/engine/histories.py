"""What attributes of a dead letter tell of the message that it was."""

import msgspec

HISTORY = "dead."  # what those attributes begin with


class History(msgspec.Struct, rename=lambda name: HISTORY + name):
    """What is needed of it."""

    topic: str
    subscription: str
    id: str
    uid: str = ""


history_of = msgspec.json.Decoder(History).decode


def history_in(about: str) -> History | None:
    """Return what a stored message says of its history; None for what is no dead letter."""
    fields = about.split(" ", 4)
    if len(fields) < 5 or f'"{HISTORY}id":"' not in fields[4]:
        return None
    try:
        return history_of(fields[4])
    except msgspec.MsgspecError:  # anybody can publish a message that says so
        return None
