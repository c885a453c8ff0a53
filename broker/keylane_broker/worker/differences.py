"""What exists already, and is not as it was asked for."""

from collections.abc import Mapping


def differences(asked: Mapping[str, object], there: Mapping[str, object]) -> str:
    """Say what differs of settings that were asked for; those that are None were not. "" if nothing does.

    >>> differences({"partitions": 8, "journal": None}, {"partitions": 4, "journal": 0})
    'partitions 4, not 8'
    """
    return ", ".join(
        f"{name} {there[name]}, not {value}"
        for name, value in asked.items()
        if value is not None and value != there[name]
    )
