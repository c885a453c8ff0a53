"""How safe a write is: memory, fsync, replicated, replicated:N; what waits for it and what was reached."""

from typing import Any

from keylane.errors import DurabilityNotReached, InvalidArgument


def replicas(level: str) -> int | None:
    """How many replicas a level needs: None where it is about something else."""
    if level in ("memory", "fsync"):
        return None
    kind, colon, count = level.partition(":")
    if kind == "replicated" and (not colon or (count.isdecimal() and 0 < int(count) < 100)):
        return int(count or 1)
    raise InvalidArgument(f"durability {level!r:.60}: use memory, fsync, replicated or replicated:N")


def check_reached(level: str, needed: int, timeout_ms: int, reached: Any) -> None:
    """Raise what tells the publisher that its messages are less safe than asked."""
    if isinstance(reached, BaseException):
        raise DurabilityNotReached(
            f"{level} was not confirmed ({reached}); the messages are stored in memory", stored=True
        ) from reached
    confirmed = reached[0] if isinstance(reached, list) else reached
    if confirmed < needed:
        raise DurabilityNotReached(
            f"{level} was not reached within {timeout_ms} ms: {confirmed} of {needed} confirmed; "
            "the messages are stored in memory",
            stored=True,
        )
