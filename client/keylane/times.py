"""Times as users give them and as the protocol wants them."""

import re
import time
from datetime import UTC, datetime, timedelta

from keylane.errors import InvalidArgument

Seconds = float | timedelta
Position = str | datetime
_POSITION = re.compile(r"earliest|latest|\d+:\d+-\d+|time:\d+")  # as the protocol has it


def seconds(what: str, value: Seconds) -> float:
    """Return a duration in seconds. Raises InvalidArgument if it is not one."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 10**9:
        raise InvalidArgument(f"{what} is {value!r}: use seconds from 0 to 10^9, or a timedelta")
    return float(value)


def milliseconds(what: str, value: Seconds | None) -> int | None:
    """Return a duration as the protocol has it; anything above zero is at least one."""
    if value is None:
        return None
    amount = seconds(what, value)
    return max(1, round(amount * 1000)) if amount else 0


def lease_ms(value: Seconds | None) -> int | None:
    """Return how long leases are to last as the protocol has it; a lease that is over at once is none."""
    amount = milliseconds("lease", value)
    if amount == 0:
        raise InvalidArgument(f"lease is {value!r}: use seconds above 0, or a timedelta")
    return amount


def instant_ms(what: str, value: datetime | None) -> int | None:
    """Return a point in time as the protocol has it."""
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidArgument(f"{what} is {value!r}: use a datetime with a time zone")
    return int(value.timestamp() * 1000)


def position_text(what: str, value: Position) -> str:
    """Return a position as the protocol has it: "earliest", "latest", an id, or a time."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return f"time:{instant_ms(what, value)}"
    if isinstance(value, str) and _POSITION.fullmatch(value):
        return value
    raise InvalidArgument(
        f"{what} is {value!r:.60}: use 'earliest', 'latest', an id like '3:1-42' or a datetime with a time "
        "zone"
    )


def moment(ms: float) -> datetime:
    """Return a datetime from milliseconds since 1970."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def typed(text: str) -> datetime:
    """Parse a time as people write it, in UTC unless it names another zone. Raises ValueError if it is none.

    >>> typed("2026-11-16T13:00")
    datetime.datetime(2026, 11, 16, 13, 0, tzinfo=datetime.timezone.utc)
    """
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def now_ms() -> int:
    """This machine's clock."""
    return int(time.time() * 1000)
