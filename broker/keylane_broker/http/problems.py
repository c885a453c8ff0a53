"""What goes wrong, as HTTP says it: a status, and problem+json with the code that errors have everywhere."""

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from keylane import errors
from keylane.errors import BrokerError

MEDIA_TYPE = "application/problem+json"
EVENTS = "text/event-stream"

# What is not listed is the caller's fault if a retry cannot help, and the broker's if it can.
_STATUS = {
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.TopicNotFound: 404,
    errors.TopicReplaced: 404,
    errors.SubscriptionNotFound: 404,
    errors.MessageNotFound: 404,
    errors.PayloadMissing: 404,
    errors.TopicExists: 409,
    errors.SubscriptionExists: 409,
    errors.SubscriptionBusy: 409,
    errors.SubscriptionMoved: 409,
    errors.ConsumerReplaced: 409,
    errors.MessageLeased: 409,
    errors.StaleReceipt: 409,
    errors.MessagesLost: 409,
    errors.MessageTooLarge: 413,
    errors.BacklogFull: 429,
    errors.Overloaded: 429,
}
_RETRY_AFTER = 1  # seconds, where a retry can help


class Problem(msgspec.Struct, frozen=True):
    """What an answer that is no success says."""

    status: int
    code: str
    detail: str
    title: str
    type: str = "about:blank"


_TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


def status_of(error: BrokerError) -> int:
    """Return the status that an error is answered with."""
    return _STATUS.get(type(error), 503 if error.retriable else 400)


def problem(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    retry: bool = False,
    after: float = 0.0,
) -> Response:
    """Answer that something is wrong."""
    said = Problem(status, code, detail, _TITLES.get(status, "Error"))
    found = dict(headers or {})
    if retry:
        found["Retry-After"] = str(max(_RETRY_AFTER, math.ceil(after)))
    if status == 401:
        found["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(said), status, found, MEDIA_TYPE)


def problem_of(error: BrokerError) -> Response:
    """Answer with an error of the broker."""
    after = error.retry_after if isinstance(error, errors.Overloaded) else 0.0
    return problem(status_of(error), error.code, str(error), retry=error.retriable, after=after)


def event_of(error: BrokerError) -> bytes:
    """Return the last of a stream of server-sent events that cannot go on."""
    return b"event: error\ndata: " + bytes(problem_of(error).body) + b"\n\n"
