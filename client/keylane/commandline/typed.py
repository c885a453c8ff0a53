"""What people type, as values: times, and NAME=VALUE."""

from datetime import datetime

from keylane import times
from keylane.commandline.output import UsageError

__all__ = ["parse_pair", "parse_time"]


def parse_time(text: str, option: str = "") -> datetime:
    """A time as it is typed; UTC unless it names another zone, as in all that we print.

    >>> parse_time("2026-11-16T13:00")
    datetime.datetime(2026, 11, 16, 13, 0, tzinfo=datetime.timezone.utc)
    """
    try:
        return times.typed(text)
    except ValueError:
        shown = f"{option} {text!r}" if option else repr(text)
        raise UsageError(f"{shown} is not a time; write it as 2026-12-31T23:59:00Z") from None


def parse_pair(text: str, option: str) -> tuple[str, str]:
    """A name and a value as they are typed.

    >>> parse_pair("region=eu", "--attr")
    ('region', 'eu')
    """
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise UsageError(f"{option} {text!r} is not of the form NAME=VALUE")
    return name, value
