"""Positions in a log, as they are written on the wire."""

from datetime import UTC, datetime

from keylane.errors import InvalidArgument
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import SubscriptionSettings

Position = str | int | datetime


def parse_position(text: str) -> tuple[Position, int | None, int]:
    """Return a position, the partition that it is about, if it is one, and the ledger; 0 is any."""
    if text in ("latest", "earliest"):
        return text, None, 0
    kind, _, rest = text.partition(":")
    if kind == "time" and rest.isdecimal() and len(rest) < 14:
        return datetime.fromtimestamp(int(rest) / 1_000, UTC), None, 0
    ledger, _, entry = rest.partition("-")
    if all(part.isdecimal() and len(part) < 15 for part in (kind, ledger, entry)):
        return int(entry), int(kind), int(ledger)
    raise InvalidArgument(
        f"position {text[:60]!r}: use 'earliest', 'latest', 'time:<ms>' or an id like '3:1-42'"
    )


async def position_in(engine: Engine, topic: str, text: str) -> tuple[Position, int | None]:
    """Return a position in a topic, and the partition that it is about, if it is one.

    An id is of one topic for ever, and not of another one of that name.
    """
    position, partition, ledger = parse_position(text)
    if ledger and partition is not None:
        await engine.check_ledger(topic, partition, ledger)
    return position, partition


async def create_subscription_at(
    engine: Engine, topic: str, name: str, settings: SubscriptionSettings, start: str, *, exist_ok: bool
) -> None:
    """Create a subscription that begins at a position."""
    position, partition = await position_in(engine, topic, start)
    await engine.create_subscription(
        topic, name, settings, start=position, partition=partition, exist_ok=exist_ok
    )
