"""Filters of subscriptions: checked, and as they are stored; lua/lib/filter.lua says what they mean."""

import re

import msgspec

from keylane.errors import InvalidArgument

MAX_GLOB = 256  # bytes
MAX_ATTRIBUTES = 16
MAX_FILTER = 4_096  # bytes of attributes and their values

_SET = re.compile(r"\[(!?)(\]?[^\]]*)\]")
_RANGE = re.compile(r"(.)-(.)", re.DOTALL)


class Filter(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a subscription is owed: a glob on the key, attributes that are equal or, with None, are there."""

    keys: str | None = None
    filter: dict[str, str | None] | None = None

    @property
    def text(self) -> str:
        """As it is stored; "" for everything."""
        if self.keys is None and self.filter is None:
            return ""
        return _encode(self).decode()


def parse_filter(text: str) -> Filter:
    """Return the filter that is stored as this text."""
    return _decode(text) if text else Filter()


def check_filter(filter: Filter) -> None:
    """Raise InvalidArgument for a filter that cannot be judged."""
    if filter.keys is not None:
        _check_glob(filter.keys)
    if filter.filter is not None:
        _check_attributes(filter.filter)


def _check_glob(glob: str) -> None:
    if type(glob) is not str or not glob or len(glob.encode("utf-8", "replace")) > MAX_GLOB:
        raise InvalidArgument(f"keys is {glob!r:.60}: use a glob of 1 to {MAX_GLOB} bytes, such as 'eu-*'")
    _check_text("keys", glob)
    for _, members in _SET.findall(glob):
        if not members or not members.isascii():
            raise InvalidArgument(f"keys has [{members}]: use one or more ASCII characters in brackets")
        for first, last in _RANGE.findall(members):
            if first > last:
                raise InvalidArgument(f"keys has [{members}]: {first}-{last} is no range, it runs backwards")
    if "[" in _SET.sub("", glob):
        raise InvalidArgument(f"keys is {glob!r}: a '[' has no ']'; [[] stands for the bracket itself")


def _check_attributes(filter: dict[str, str | None]) -> None:
    if not isinstance(filter, dict) or not 1 <= len(filter) <= MAX_ATTRIBUTES:
        raise InvalidArgument(
            f"filter is {filter!r:.60}: use 1 to {MAX_ATTRIBUTES} attributes and their values"
        )
    for name, value in filter.items():
        if type(name) is not str or not (value is None or type(value) is str):
            raise InvalidArgument(f"filter has {name!r:.40}: {value!r:.40}: use text, or None for any value")
        _check_text("filter", name + (value or ""))
    if len(_encode(filter)) > MAX_FILTER:
        raise InvalidArgument(f"filter has {len(_encode(filter))} bytes, at most {MAX_FILTER}")


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise InvalidArgument(
            f"{what} has a NUL character, which no key or attribute that it is for can have"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} has text that is not valid Unicode: {error}") from error


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Filter).decode
