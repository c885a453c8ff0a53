"""Exceptions out of task groups."""

import contextlib
from collections.abc import Iterator

__all__ = ["unwrapped"]


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
