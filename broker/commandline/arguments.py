"""Arguments that several commands take."""

import re
from datetime import datetime
from typing import Annotated

import typer

from broker.commandline.session import Usage

__all__ = ["ModeOption", "PartitionOption", "SubscriptionArgument", "TopicArgument", "position_of"]

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
    """A place in a topic as it is typed: a word, an id or a time, local unless it says which."""
    if WORDS_AND_IDS.fullmatch(text):
        return text
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise Usage(
            f"{text!r} is no position: use earliest, latest, an id like 3:1-42 or a time like 2026-12-31"
        ) from None
