"""Arguments that several commands take."""

import re
from datetime import datetime
from typing import Annotated

import typer

from keylane.commandline.output import UsageError
from keylane.commandline.typed import parse_time

__all__ = ["PartitionOption", "SubscriptionArgument", "TopicArgument", "parse_position"]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic name.", show_default=False)]
SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="Subscription name.", show_default=False)
]
PartitionOption = Annotated[
    int | None, typer.Option(help="Limit to this partition.", min=0, show_default=False)
]

WORDS_AND_IDS = re.compile(r"earliest|latest|\d+:\d+-\d+")


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
