"""Errors that come through Spark, told in one line."""

import re
from collections.abc import Mapping

from keylane import errors
from keylane.commandline.output import CommandError

__all__ = ["explain_spark_error"]

# As an executor's Python reports an error of ours, in the middle of a page of the JVM's.
_OURS = re.compile(r"^keylane(?:\.errors|_spark(?:\.\w+)+)\.(\w+): (.+)$", re.MULTILINE)


def explain_spark_error(text: str, wording: Mapping[str, str] | None = None) -> CommandError:
    """The error of ours that Spark reports, if there is one, else the first line of what it says.

    In ours, phrases that are keys of `wording` become its values.

    >>> explain_spark_error("…\\nkeylane.errors.TopicNotFound: no topic 'ordes'\\n\\n\\tat org.apache.spark…")
    CommandError("no topic 'ordes'")
    """
    if found := _OURS.findall(text):
        name, message = found[-1]
        for option, flag in (wording or {}).items():
            message = message.replace(option, flag)
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.BrokerError):
            return CommandError(message, code=kind.code, retriable=kind.retriable)
        return CommandError(message)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return CommandError(lines[0] if lines else "Spark failed without a message", code="spark")
