"""Errors that say what is wrong without the way through the code, which Spark puts in front of all others."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from keylane.errors import BrokerError, ProtocolError
from keylane_spark.errors import DataLoss

P = ParamSpec("P")
T = TypeVar("T")


def plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Have what Spark calls raise plain errors."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        with plain_errors():
            return function(*args, **options)

    return call


def plainly_each(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """The same for a function whose work is done while its results are taken."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> Iterator[T]:
        with plain_errors():
            yield from function(*args, **options)

    return call


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors of the broker and of lost data are told in a line; any other is perhaps a defect of ours."""
    try:
        yield
    except (BrokerError, DataLoss) as error:
        if not isinstance(error, ProtocolError) and _is_sparks():
            # Spark looks at this when it tells of the error, after which it ends the process.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def _is_sparks() -> bool:
    """Whether Spark has started this process, as `python -m pyspark.…`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
