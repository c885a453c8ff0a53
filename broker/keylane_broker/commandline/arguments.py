"""Arguments that several commands take."""

import re
from datetime import datetime
from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.commandline.typed import parse_time
from keylane.types import Backoff

__all__ = [
    "BackoffOption",
    "FilterOption",
    "KeysOption",
    "PartitionOption",
    "SubscriptionArgument",
    "TopicArgument",
    "parse_backoff",
    "parse_filter",
    "parse_position",
]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic name.", show_default=False)]
SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Subscription name.", show_default=False)
]
PartitionOption = Annotated[
    int | None, typer.Option(help="Limit to this partition.", min=0, show_default=False)
]

KeysOption = Annotated[
    str | None,
    typer.Option(
        metavar="GLOB",
        help="Only messages whose key fits, such as 'eu-*': * ? \\[a-z] [!a-z].",
        show_default=False,
    ),
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="Only messages with this attribute, of this value or any; may be repeated.",
        show_default=False,
    ),
]
BackoffOption = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS[,…]",
        help="Wait before each redelivery: 5 is always 5 s; 1,2,300,0.2 is 1 s, "
        "times 2 each time, up to 300 s, less up to 0.2 of it; 0 is none.",
        show_default=False,
    ),
]

WORDS_AND_IDS = re.compile(r"earliest|latest|\d+:\d+-\d+")


def parse_filter(words: list[str] | None) -> dict[str, str | None] | None:
    """Attributes and their values as they are typed; None stands for any value."""
    if not words:
        return None
    pairs = [word.partition("=") for word in words]
    if not all(name for name, _, _ in pairs):
        raise UsageError("--filter needs a name, as in --filter region=eu or --filter urgent")
    return {name: value if equals else None for name, equals, value in pairs}


def parse_backoff(text: str) -> Backoff | float | None:
    """A backoff as it is typed: seconds that stay the same, or that grow; 0 is none."""
    try:
        numbers = [float(word) for word in text.split(",")]
        return (numbers[0] or None) if len(numbers) == 1 else Backoff(*numbers)
    except (ValueError, TypeError):
        raise UsageError(
            f"{text!r} is not a backoff; use seconds, or initial,factor,maximum,jitter as in 1,2,300,0.2"
        ) from None


def parse_position(text: str) -> str | datetime:
    """A position in a topic as it is typed: a word, an id or a time."""
    if WORDS_AND_IDS.fullmatch(text):
        return text
    try:
        return parse_time(text)
    except UsageError:
        raise UsageError(
            f"{text!r} is not a position; use earliest, latest, an id like 3:1-42 or a time like 2026-12-31"
        ) from None
