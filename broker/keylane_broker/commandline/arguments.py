"""Arguments that several commands take."""

import re
from datetime import datetime
from typing import Annotated

import typer

from keylane_broker.commandline.command import Usage

__all__ = ["ModeOption", "PartitionOption", "SubscriptionArgument", "TopicArgument", "position_of", "time_of"]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription.", show_default=False)
]
PartitionOption = Annotated[int | None, typer.Option(help="Only this partition.", min=0, show_default=False)]
ModeOption = Annotated[
    str | None, typer.Option(help="shared, key_shared, exclusive, failover or cursor.", show_default=False)
]

WORDS_AND_IDS = re.compile(r"earliest|latest|\d+:\d+-\d+")


def position_of(text: str) -> str | datetime:
    """A place in a topic as it is typed: a word, an id or a time."""
    if WORDS_AND_IDS.fullmatch(text):
        return text
    try:
        return time_of(text)
    except Usage:
        raise Usage(
            f"{text!r} is no position: use earliest, latest, an id like 3:1-42 or a time like 2026-12-31"
        ) from None


def time_of(text: str) -> datetime:
    """A time as it is typed; UTC unless it says another zone."""
    from keylane.times import typed

    try:
        return typed(text)
    except ValueError:
        raise Usage(f"{text!r} is no time: write it as 2026-12-31T23:59:00Z") from None
