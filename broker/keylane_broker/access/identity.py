"""Who somebody is, once a token has said so, and what that allows."""

import re
from functools import lru_cache
from typing import NamedTuple

from keylane.errors import BrokerError, Forbidden, InvalidArgument, TopicNotFound
from keylane_broker.access.actions import ACTIONS, Action, Need

_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,200}")
_HINT = re.compile(r"; did you mean '([^']*)'\?")
_IMPLIED: dict[Action, tuple[Need, ...]] = {  # who may do this may do these
    "admin": (*ACTIONS, "use"),
    "produce": ("produce", "observe", "use"),
    "consume": ("consume", "observe", "use"),
    "observe": ("observe",),
}


class Grant(NamedTuple):
    """An action on the topics whose names match a pattern, in which `*` stands for anything."""

    action: Action
    pattern: str

    def __str__(self) -> str:
        return f"{self.action}:{self.pattern}"


def parse_grant(text: str) -> Grant:
    """Read `produce:orders.*`; InvalidArgument says what is wrong."""
    action, colon, pattern = text.partition(":")
    if not colon or action not in ACTIONS or not _PATTERN.fullmatch(pattern):
        raise InvalidArgument(
            f"{text!r:.60} is no permission: use {', '.join(ACTIONS)}, a colon and a topic, such as "
            "'produce:orders.*' or 'admin:*'"
        )
    return Grant(action, pattern)


@lru_cache(maxsize=1_024)
def _pieces(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split("*"))


def _fits(topic: str, pattern: str) -> bool:
    """Whether a topic matches a pattern; never tries twice, since a topic may be as long as a frame here.

    >>> _fits("eu.orders.new", "*.orders.*")
    True
    """
    first, *middle = _pieces(pattern)
    if not middle:
        return topic == pattern
    last = middle.pop()
    at, end = len(first), len(topic) - len(last)
    if end < at or not topic.startswith(first) or not topic.endswith(last):
        return False
    for piece in middle:
        at = topic.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


class Identity(NamedTuple):
    """Somebody: `token` or `key` can be revoked, "" for none; `expires` is a unix time, 0 for never."""

    name: str
    grants: tuple[Grant, ...]
    token: str = ""
    expires: float = 0.0
    key: str = ""  # the digest of the one that has signed for them

    def may(self, action: Need, topic: str | None) -> bool:
        """Whether an action is allowed on a topic; None: on all there are."""
        return any(
            action in _IMPLIED[grant.action]
            and (grant.pattern == "*" if topic is None else _fits(topic, grant.pattern))
            for grant in self.grants
        )

    def require(self, action: Need, topic: str | None) -> None:
        """Raise Forbidden unless an action is allowed."""
        if not self.may(action, topic):
            where = f"topic {topic!r}" if topic is not None else "all topics"
            what, least = ("produce or consume", "produce") if action == "use" else (action, action)
            raise Forbidden(
                f"{self.name!r} may not {what} on {where}: its token needs {least}:{topic or '*'}"
            )

    def require_somewhere(self, action: Need) -> None:
        """Raise Forbidden unless an action is allowed on some topic."""
        if not any(action in _IMPLIED[grant.action] for grant in self.grants):
            raise Forbidden(f"{self.name!r} may not {action} on any topic")

    def require_dead_letter(self, topic: str, dead_letter: str | None) -> None:
        """Raise Forbidden unless dead letters of a topic may go there; to its own they always may."""
        if dead_letter and dead_letter != f"{topic}.dead":
            self.require("produce", dead_letter)

    def told(self, error: BrokerError) -> str:
        """Return the text of an error, without the name of a topic that is not to be seen."""
        text = str(error)
        hint = _HINT.search(text) if isinstance(error, TopicNotFound) else None
        if hint is None or (self is not WORKER and self.may("observe", hint[1])):
            return text
        return text.replace(hint[0], "")  # a worker asks on behalf of somebody else


EVERYBODY = Identity("everybody", (Grant("admin", "*"),))  # where nobody needs a token
WORKER = Identity("a worker", EVERYBODY.grants)  # of the same cluster
