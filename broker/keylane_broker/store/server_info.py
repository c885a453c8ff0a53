"""What a server says of itself: its version, its replicas, and how it confirms fsync."""

import re

LOWEST = (7, 0)  # the oldest version of Redis that has all that the scripts use
CONFIRMS_FSYNC = (7, 2)  # the oldest one that has WAITAOF


def facts_of(info: str) -> dict[str, str]:
    """Return what INFO says, by name."""
    return dict(re.findall(r"^(\w+):([^\r\n]*)", info, re.MULTILINE))


def life_of(info: str) -> str:
    """Return what lasts while a server runs and is not promoted: afterwards it may lack writes."""
    facts = facts_of(info)
    return " ".join(facts.get(name, "") for name in ("run_id", "master_replid2", "second_repl_offset"))


def replicas_online(info: str) -> int:
    """Return how many replicas follow a server, by what it says of replication."""
    return len(re.findall(r"^slave\d+:.*\bstate=online\b", info, re.MULTILINE))


def fsync_confirmation(info: str, appendfsync: str | None) -> str | None:
    """Return how a server confirms fsync: "wait" by WAITAOF, "always" with every answer, None not at all."""
    facts = facts_of(info)
    if facts.get("aof_enabled") != "1":
        return None
    version = tuple(int(number) for number in re.findall(r"\d+", facts.get("redis_version", "")))
    if "valkey_version" in facts or version >= CONFIRMS_FSYNC:
        return "wait"
    return "always" if appendfsync == "always" else None
