"""Where workers may listen, as applications say it; the pool asks one after the other, until one answers."""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from keylane import wire
from keylane.errors import InvalidArgument

DEFAULT_SERVER = f"keylane://127.0.0.1:{wire.PORT}"


def named_server(server: str | None) -> str | None:
    """Return the given server, else KEYLANE_SERVER, else None."""
    return server or os.environ.get("KEYLANE_SERVER") or None


def server_or_default(seeds: str | Iterable[str] | None) -> str | Iterable[str]:
    """Return the given seeds, else KEYLANE_SERVER, else this machine."""
    return named_server(None) or DEFAULT_SERVER if seeds is None else seeds


def token_or_default(token: str | None) -> str | None:
    """Return the given token, else KEYLANE_TOKEN."""
    return os.environ.get("KEYLANE_TOKEN") or None if token is None else token


class Seed(NamedTuple):
    """Where a worker may listen."""

    host: str
    port: int
    tls: bool

    @property
    def address(self) -> str:
        """`host:port`, as workers write it."""
        return wire.address_of(self.host, self.port)

    def __str__(self) -> str:
        return f"keylane{'s' if self.tls else ''}://{self.address}"


def parse_seeds(seeds: str | Iterable[str]) -> list[Seed]:
    """Seeds from one URL, a list of them, or one with several hosts."""
    found = []
    if isinstance(seeds, bytes) or not isinstance(seeds, Iterable):
        raise InvalidArgument(f"seeds is {seeds!r:.60}: use keylane://host:port, or a list of such URLs")
    for url in [seeds] if isinstance(seeds, str) else seeds:
        scheme, separator, rest = str(url).partition("://")
        if not separator or scheme not in ("keylane", "keylanes"):
            raise InvalidArgument(
                f"{url!r:.60} is not the URL of a broker: use keylane://host:port, or keylanes:// for TLS"
            )
        if "@" in rest:  # not shown: there may be a password in it
            raise InvalidArgument(
                "the URL of a broker has a user or password, which workers do not take: give a token, with "
                "token=… or KEYLANE_TOKEN"
            )
        for place in rest.rstrip("/").split(","):
            if place != (plain := re.split("[/?#]", place)[0]):
                raise InvalidArgument(
                    f"{url!r}: {place.removeprefix(plain)!r} is not allowed here; use keylane://host:port"
                )
            seed = parse_address(place, scheme == "keylanes")
            if seed is None:
                raise InvalidArgument(f"{url!r}: {place!r} is not a host and port; use keylane://host:port")
            found.append(seed)
    if not found:
        raise InvalidArgument(
            "no broker is named: name at least one worker, such as keylane://127.0.0.1:9999"
        )
    return found


def parse_address(address: str, tls: bool) -> Seed | None:
    """`host:port` or `host`; None if it is something else."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return Seed(host, port or wire.PORT, tls) if host else None
