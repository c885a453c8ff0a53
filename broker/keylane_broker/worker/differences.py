"""What exists already, and is not as it was asked for."""

from collections.abc import Mapping

_TIMES = {"dedupe_ms": "dedupe_window", "lease_ms": "lease", "retention_ms": "retention", "ttl_ms": "ttl"}


def differences(asked: Mapping[str, object], there: Mapping[str, object]) -> str:
    """Say what differs of settings that were asked for; those that are None were not. "" if nothing does.

    >>> differences({"partitions": 8, "journal": None}, {"partitions": 4, "journal": 0})
    'partitions 4, not 8'

    Times are said as people give them:

    >>> differences({"retention_ms": 1_500}, {"retention_ms": 0})
    'retention none, not 1.5 s'
    """
    return ", ".join(
        f"{_TIMES.get(name, name)} {_said(name, there[name])}, not {_said(name, value)}"
        for name, value in asked.items()
        if value is not None and value != there[name]
    )


def _said(name: str, value: object) -> str:
    if name not in _TIMES or not isinstance(value, int):
        return str(value)
    if value < 0:
        return "forever"
    return f"{value / 1_000:g} s" if value else "none"
