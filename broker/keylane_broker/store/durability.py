"""How safe a write is: memory, fsync, replicated, replicated:N; what waits for it and what was reached."""

import re
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


def facts_of(info: str) -> dict[str, str]:
    """What INFO says, by name."""
    return dict(re.findall(r"^(\w+):([^\r\n]*)", info, re.MULTILINE))


def replicas_online(info: str) -> int:
    """How many replicas follow a server, by what it says of replication."""
    return len(re.findall(r"^slave\d+:.*\bstate=online\b", info, re.MULTILINE))


def fsync_confirmation(info: str, appendfsync: str | None) -> str | None:
    """How a server confirms fsync: "wait" by WAITAOF, "always" with every answer, None not at all."""
    facts = facts_of(info)
    if facts.get("aof_enabled") != "1":
        return None
    version = tuple(int(number) for number in re.findall(r"\d+", facts.get("redis_version", "")))
    if "valkey_version" in facts or version >= (7, 2):
        return "wait"
    return "always" if appendfsync == "always" else None


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
