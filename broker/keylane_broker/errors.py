"""Errors of the processes that make up a broker; those that clients hear of are in keylane.errors."""

import contextlib
from collections.abc import Iterator

from keylane.errors import Fenced

__all__ = ["AddressInUse", "NotOwner", "ServerError", "unwrapped"]


class ServerError(Exception):
    """A server could not be found, started or used."""


class AddressInUse(ServerError):
    """Something else listens on the port."""


class NotOwner(Fenced):
    """Another worker serves the partition; clients are redirected to it."""

    def __init__(self, topic: str, partition: int, worker: str, address: str) -> None:
        super().__init__(f"partition {partition} of {topic!r} is served by {worker or 'another worker'}")
        self.topic = topic
        self.partition = partition
        self.address = address


NotOwner.code = Fenced.code


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the one exception that a task group ended with as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__
