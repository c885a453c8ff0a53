"""Errors of the processes that make up a broker; those that clients hear of are in keylane.errors."""

import contextlib
from collections.abc import Iterator

__all__ = ["AddressInUse", "ServerError", "unwrapped"]


class ServerError(Exception):
    """A server could not be found, started or used."""


class AddressInUse(ServerError):
    """Something else listens on the port."""


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
