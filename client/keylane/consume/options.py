"""How a consumer is to consume."""

import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import getpid
from typing import NamedTuple, get_args

from keylane import wire
from keylane.checks import as_dict, check_callable, check_request
from keylane.consume.handlers import Handler
from keylane.consume.message import Message
from keylane.errors import InvalidArgument
from keylane.times import Position, Seconds, lease_ms, position_text, seconds
from keylane.types import Mode

MAX_PERMITS = 10_000
PATIENCE = 3600.0  # seconds that an idle application keeps its leases


class ConsumerOptions(NamedTuple):
    """How to consume; see AsyncClient.subscribe."""

    mode: str | None
    start: Position
    name: str | None
    permits: int
    lease: Seconds | None
    auto_extend: bool | Seconds
    on_stale: Callable[[Message], None] | None
    partitions: Sequence[int] | None
    handler: Handler | None
    concurrency: int
    keys: str | None = None
    filter: Mapping[str, str | None] | None = None

    def request(self, topic: str, subscription: str, name: str) -> wire.Subscribe:
        """Return what to ask of the workers. Raises InvalidArgument if an option is not valid."""
        if type(self.permits) is not int or not 1 <= self.permits <= MAX_PERMITS:
            raise InvalidArgument(f"permits is {self.permits!r}: use 1 to {MAX_PERMITS}")
        if self.partitions is not None and not isinstance(self.partitions, Iterable):
            raise InvalidArgument(f"partitions is {self.partitions!r:.60}: use a list of numbers")
        if self.partitions is not None and not self.partitions:
            raise InvalidArgument("partitions is empty: name at least one, or None for all")
        if isinstance(self.mode, str) and self.mode not in get_args(Mode):
            raise InvalidArgument(f"mode {self.mode!r:.60}: use one of {', '.join(get_args(Mode))}")
        check_callable("on_stale", self.on_stale)
        request = wire.Subscribe(
            0,
            topic,
            subscription,
            name,
            self.mode,
            position_text("start", self.start),
            lease_ms(self.lease),
            self.permits,
            None if self.partitions is None else list(self.partitions),
            keys=self.keys,
            filter=as_dict("filter", self.filter),
        )
        check_request(request)
        return request

    def patience(self) -> float:
        """For how many seconds to extend the leases of an idle application; 0 for never."""
        if isinstance(self.auto_extend, bool):
            return PATIENCE if self.auto_extend else 0.0
        return seconds("auto_extend", self.auto_extend)


def unique_name() -> str:
    """Return a name that no other consumer has."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:100] or "host"
    return f"{host}-{getpid()}-{secrets.token_hex(4)}"
