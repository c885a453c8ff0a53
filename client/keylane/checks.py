"""Whether arguments are of the types that they should be."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from keylane.errors import InvalidArgument, InvalidName, ProtocolError
from keylane.wire import Properties, pack, unpack

T = TypeVar("T")

_UNSENDABLE = (ProtocolError, TypeError, ValueError, OverflowError, RecursionError)


def check(what: str, value: object, kind: Any) -> None:
    """Raise InvalidArgument unless a value can be sent as one of this type.

    >>> check("partitions", 8, int | None)
    """
    try:
        unpack(pack(value), kind)
    except _UNSENDABLE:
        raise InvalidArgument(f"{what} is {value!r:.60}: use {_words(kind)}") from None


def check_callable(what: str, value: object) -> None:
    """Raise InvalidArgument unless a value is a function, or None."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{what} is {value!r:.60}: use a function")


def as_dict(what: str, value: Mapping[str, T] | None) -> dict[str, T] | None:
    """Return a mapping as it is sent; raises InvalidArgument for what is none."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument(f"{what} is {value!r:.60}: use a dict")
    return None if value is None else dict(value)


def check_topic(topic: object) -> None:
    """Raise InvalidName for what cannot be a topic."""
    if not isinstance(topic, str) or not topic:  # INFO takes "" for "no topic"
        raise InvalidName(f"the topic is {topic!r:.60}: use letters, digits, '.', '_' or '-'")


def check_request(properties: Properties) -> None:
    """Raise InvalidArgument for the first field that is of the wrong type, which the broker would refuse."""
    try:
        unpack(pack(properties), type(properties))
    except _UNSENDABLE:
        check_topic(getattr(properties, "topic", "-"))
        for field in msgspec.structs.fields(properties):
            check(field.name, getattr(properties, field.name), field.type)
        raise


def _words(kind: Any) -> str:
    """Return a type as it is written in Python."""
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
