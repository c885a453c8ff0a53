"""What an operation of the HTTP interface is: its place, its types, who may do it, and what does it.

    @operation("POST", "/v1/topics", status=201)
    async def create_topic(call: Call, body: NewTopic) -> TopicInfo:
        \"\"\"Create a topic.\"\"\"

Routes, the OpenAPI document and the check of permissions are all made from the same list of these.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar, get_type_hints

from starlette.requests import Request
from starlette.responses import Response

from keylane import AsyncClient
from keylane_broker.access.actions import NEEDS, Need
from keylane_broker.access.identity import Identity
from keylane_broker.access.rates import PublishRates
from keylane_broker.http.homes import Homes
from keylane_broker.http.leasing import Leasing
from keylane_broker.http.room import Content, Room

Scrape = Callable[[str], Awaitable[Response]]  # tells the metrics, in a format that is accepted


class Call(NamedTuple):
    """A request, and what it is carried out with."""

    client: AsyncClient
    leasing: Leasing
    homes: Homes
    metrics: Scrape
    identity: Identity  # who asks
    request: Request
    content: Content  # of the request
    room: Room
    rates: PublishRates

    @property
    def topic(self) -> str:
        """The topic of the path."""
        return self.request.path_params["topic"]  # type: ignore[no-any-return]

    @property
    def subscription(self) -> str:
        """The subscription of the path."""
        return self.request.path_params["subscription"]  # type: ignore[no-any-return]


class Operation(NamedTuple):
    """A method of a path; `action` is what one must be allowed to do, on the topic if there is one."""

    name: str
    summary: str
    method: str
    path: str
    action: Need
    handler: Callable[..., Awaitable[Any]]
    body: Any  # type of the JSON body, None where there is none
    query: Any  # type of the query
    reply: Any  # type of the JSON answer; Response where the handler answers by itself
    status: int
    takes: tuple[str, ...]  # media types of bodies that the handler reads by itself
    gives: str  # media type of the answer


OPERATIONS: list[Operation] = []
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def operation(
    method: str,
    path: str,
    *,
    status: int = 200,
    takes: tuple[str, ...] = (),
    gives: str = "application/json",
) -> Callable[[Handler], Handler]:
    """Make a function the one that does an operation; its arguments and answer are typed."""

    def add(handler: Handler) -> Handler:
        hints = get_type_hints(handler, include_extras=True)
        reply = hints.get("return")
        OPERATIONS.append(
            Operation(
                handler.__name__,
                (handler.__doc__ or "").strip().splitlines()[0].rstrip("."),
                method,
                path,
                NEEDS[handler.__name__],
                handler,
                hints.get("body"),
                hints.get("query"),
                reply,
                204 if reply is type(None) else status,
                takes,
                gives,
            )
        )
        return handler

    return add


def answers_by_itself(one: Operation) -> bool:
    """Whether the handler makes the answer, rather than say what is in it."""
    return isinstance(one.reply, type) and issubclass(one.reply, Response)
