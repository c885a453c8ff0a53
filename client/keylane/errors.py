"""All errors by name; their codes are the same in Python, the protocol and `--json`.

BrokerError
├── ConnectionFailed         retriable
├── ConnectionClosed         retriable
├── Unavailable              retriable   the broker cannot reach Redis
├── Overloaded               retriable
├── Fenced                   retriable   another worker owns the partition now
├── Unauthorized
├── Forbidden
├── TopicNotFound
│   └── TopicReplaced                    deleted, and another of the same name created since
├── TopicExists
├── SubscriptionNotFound
├── SubscriptionExists
├── SubscriptionBusy         retriable
├── SubscriptionMoved                    a seek moved it since it was read
├── MessagesLost                         the server lost what was read and reused its entries
├── ConsumerReplaced                     a newer connection has the consumer's name
├── InvalidName
├── InvalidArgument
├── MessageTooLarge
├── MessageLeased            retriable
├── MessageNotFound
├── BacklogFull              retriable
├── StaleReceipt
├── PayloadMissing
├── DurabilityNotReached     retriable
├── PublishFailed                        some messages of a call failed; retriable if all its errors are
├── IncompatibleVersion
└── ProtocolError
"""

import copy
import difflib
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, ClassVar, Self

from keylane.types import Published

_COMPARED = 100  # names, some 30 us each


class BrokerError(Exception):
    """The base of all errors; `code` says what went wrong, `retriable` whether a retry can help."""

    code: ClassVar[str] = "broker_error"
    retriable: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __reduce__(self) -> tuple[Any, ...]:
        # Without __init__, whose arguments may be others than the text that was made of them.
        return _made_again, (type(self), self.args), vars(self)

    def again(self) -> Self:
        """Return a copy to raise: an error that is kept must not keep the frames of all who raise it."""
        error = copy.copy(self)
        error.__cause__ = self.__cause__
        return error


def _made_again(kind: type[BrokerError], args: tuple[Any, ...]) -> BrokerError:
    return kind.__new__(kind, *args)


class ConnectionFailed(BrokerError):
    """No broker could be reached."""

    retriable = True


class ConnectionClosed(BrokerError):
    """The connection ended before the answer came."""

    retriable = True


class Unavailable(BrokerError):
    """The broker cannot reach Redis, or is stopping; the request may have been carried out."""

    retriable = True


class Overloaded(BrokerError):
    """The broker or its Redis cannot take more right now; `retry_after` is in how many seconds it may."""

    retriable = True

    def __init__(self, text: str, *, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Fenced(BrokerError):
    """The partition lease of the caller has ended or moved on; nothing was changed."""

    retriable = True


class Unauthorized(BrokerError):
    """The token is missing or unknown."""


class Forbidden(BrokerError):
    """The token does not allow this action on this topic."""


class TopicNotFound(BrokerError):
    """There is no topic of that name."""


class TopicReplaced(TopicNotFound):
    """The topic was deleted and another of the same name created since; nothing was changed."""


class TopicExists(BrokerError):
    """A topic of that name already exists."""


class SubscriptionNotFound(BrokerError):
    """There is no subscription of that name on the topic."""


class SubscriptionExists(BrokerError):
    """A subscription of that name already exists, or has another mode."""


class SubscriptionBusy(BrokerError):
    """An exclusive subscription already has a consumer."""

    retriable = True


class SubscriptionMoved(BrokerError):
    """A seek has moved the subscription since its reader asked for its position, and takes precedence."""


class MessagesLost(BrokerError):
    """The server lost its newest writes, and reused the entries of what was read for other messages."""


class ConsumerReplaced(BrokerError):
    """Another consumer of the same name has connected, or another reader has claimed the subscription."""


class InvalidName(BrokerError):
    """A topic, subscription, consumer or worker name breaks the rules."""


class InvalidArgument(BrokerError):
    """An argument is not valid; nothing was changed."""


class MessageTooLarge(BrokerError):
    """A message, or part of it, exceeds a limit."""


class MessageLeased(BrokerError):
    """A consumer has the message."""

    retriable = True


class MessageNotFound(BrokerError):
    """There is no such message, or no longer."""


class BacklogFull(BrokerError):
    """The topic's backlog quota is used up."""

    retriable = True


class StaleReceipt(BrokerError):
    """The lease behind the receipt has ended."""


class PayloadMissing(BrokerError):
    """The message's body is not in the payload store."""


class DurabilityNotReached(BrokerError):
    """The durability asked for was not reached; `stored` says whether Redis has the message."""

    retriable = True

    def __init__(self, text: str, *, stored: bool = False) -> None:
        super().__init__(text)
        self.stored = stored


class PublishFailed(BrokerError):
    """Some messages of a call failed; `published` has the result of each, in order."""

    def __init__(self, text: str, published: Sequence[Published | Exception] = ()) -> None:
        super().__init__(text)
        self.published = published
        errors = {id(answer): answer for answer in published if isinstance(answer, Exception)}
        self.exceptions = tuple(errors.values())  # each error once
        self.retriable = all(getattr(error, "retriable", False) for error in self.exceptions)


def error_named(code: str, text: str, *, stored: bool = False, retry_after: float = 0.0) -> BrokerError:
    """Return the error of a code, as the protocol and HTTP have it."""
    kind = _by_code().get(code, BrokerError)
    if kind is DurabilityNotReached:
        return DurabilityNotReached(text, stored=stored)
    if kind is Overloaded:
        return Overloaded(text, retry_after=retry_after)
    return kind(text)


@cache
def _by_code() -> dict[str, type[BrokerError]]:
    kinds = [BrokerError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind for kind in kinds if kind.__module__ == __name__}


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return what to add to "there is no such name"; nothing if no name is like it.

    Of many names only those count that one slip of the finger leads to.

    >>> did_you_mean("ordes", ["orders", "payments"])
    "; did you mean 'orders'?"
    """
    others = [other for other in names if other != name]
    if len(others) > _COMPARED:  # comparing them all would take long
        half = len(name) // 2
        begin, end = name[:half], name[len(name) - half :]  # one of them is right
        others = [
            other
            for other in others
            if abs(len(other) - len(name)) <= 1 and (other.startswith(begin) or other.endswith(end))
        ]
    if _COMPARED < len(others) <= 10 * _COMPARED:
        others = [other for other in others if _in_common(name, other) >= max(len(name), len(other)) - 2]
    near = difflib.get_close_matches(name, others, 1) if len(others) <= _COMPARED else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _in_common(one: str, other: str) -> int:
    """Return how many characters two names have in common at the beginning and at the end."""
    shorter = min(len(one), len(other))
    begin = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    end = next((at for at in range(shorter - begin) if one[-1 - at] != other[-1 - at]), shorter - begin)
    return begin + end


class IncompatibleVersion(BrokerError):
    """Client and broker have no protocol version in common."""


class ProtocolError(BrokerError):
    """The other side sent something that the protocol does not allow."""
