"""Checks of options that readers and writers share."""

from collections.abc import Mapping
from typing import NoReturn

from keylane.errors import InvalidArgument, did_you_mean


def known(options: Mapping[str, str], names: tuple[str, ...], doing: str) -> dict[str, str]:
    """The options under their proper names; an unknown one is refused."""
    proper = {name.lower(): name for name in names}
    given = {}
    for name, value in options.items():
        if name.lower() in proper:
            given[proper[name.lower()]] = value
        elif name.lower() == "path":
            raise InvalidArgument(
                f"keylane takes no path ({value!r}): name the topic with .option('subscribe', …) to read and "
                ".option('topic', …) to write"
            )
        else:
            hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
            raise InvalidArgument(f"keylane has no option {name!r} for {doing}{hint}")
    return given


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """An option has a value that it cannot have."""
    raise InvalidArgument(f"option {name!r} is {value!r}: use {allowed}")
