"""The HTTP interface, an ASGI application: routes from the list of operations, and answers to what fails."""

import logging
from collections.abc import Awaitable, Callable
from itertools import starmap
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from keylane import AsyncClient, BrokerError, InvalidArgument
from keylane_broker.access.control import AccessControl
from keylane_broker.access.identity import Identity
from keylane_broker.access.rates import PublishRates
from keylane_broker.http import (
    administration,
    bodies,
    consuming,
    dead_letters,
    messages,
    metrics,
    openapi,
    peeking,
    publishing,
)
from keylane_broker.http.homes import Homes
from keylane_broker.http.leasing import Leasing
from keylane_broker.http.live_requests import LiveRequests
from keylane_broker.http.operations import OPERATIONS, Call, Operation, Scrape
from keylane_broker.http.other_sites import Hosts, check_site
from keylane_broker.http.problems import problem, problem_of
from keylane_broker.http.room import Content, Room

__all__ = ["OPERATIONS", "application"]

log = logging.getLogger("keylane.broker")

JSON = "application/json"
_MODULES = (
    administration,
    publishing,
    peeking,
    consuming,
    messages,
    dead_letters,
    metrics,
    bodies,
)  # of operations
Endpoint = Callable[[Request], Awaitable[Response]]
Identify = Callable[[Operation, Request], Awaitable[Identity]]
_TWO_LENGTHS = {b"content-length", b"transfer-encoding"}
_CODES = {404: "not_found", 405: "method_not_allowed"}


def application(
    client: AsyncClient,
    leasing: Leasing,
    homes: Homes,
    access: AccessControl,
    scrape: Scrape,
    *,
    version: str,
    room: Room,
    live: LiveRequests,
    hosts: Hosts,
    rates: PublishRates,
    health: list[Route],
) -> ASGIApp:
    """Return the application; `health` are the routes that say how the worker is."""

    async def identify(one: Operation, request: Request) -> Identity:
        if not access.enabled:  # a browser needs no token, whatever page it shows
            check_site(request.headers, hosts)
        identity = await _identify(one, access, request)
        live.came_from(identity)
        return identity

    document = msgspec.json.encode(openapi.document(version))

    async def describe(_: Request) -> Response:
        return Response(document, media_type=JSON)

    paths: dict[str, dict[str, Endpoint]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _endpoint(
            one, client, leasing, homes, identify, scrape, room, rates
        )
    app = Starlette(
        routes=[*starmap(_route, paths.items()), Route("/openapi.json", describe), *health],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    app.router.redirect_slashes = False  # to wherever the Host of the request says
    return _refuse_two_lengths(live.around(app))


def _refuse_two_lengths(app: ASGIApp) -> ASGIApp:
    """Refuse a request that says twice how long it is: a proxy may believe the other one (RFC 9112, 6.1)."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if {name for name, _ in scope["headers"]} >= _TWO_LENGTHS:
            detail = "a request has Content-Length and Transfer-Encoding: use one of them"
            answer = problem(400, InvalidArgument.code, detail, {"Connection": "close"})
            await answer(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _route(path: str, endpoints: dict[str, Endpoint]) -> Route:
    """One for all methods of a path, so that another one is answered with those that there are."""

    async def choose(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    # A uid stands for a message, too, and may have a slash.
    return Route(path.replace("{id}", "{id:path}"), choose, methods=list(endpoints))


def _endpoint(
    one: Operation,
    client: AsyncClient,
    leasing: Leasing,
    homes: Homes,
    identify: Identify,
    scrape: Scrape,
    room: Room,
    rates: PublishRates,
) -> Endpoint:
    decode = msgspec.json.Decoder(one.body).decode if one.body is not None and not one.takes else None

    async def endpoint(request: Request) -> Response:
        content = Content(room, request)
        try:
            identity = await identify(one, request)
            arguments: dict[str, Any] = {}
            if decode is not None:
                arguments["body"] = decode(await content.read() or b"{}")
            elif one.body is not None:
                arguments["body"] = None  # the handler reads it
            elif _has_body(request) and not one.takes and (await content.read()).strip() not in (b"", b"{}"):
                raise InvalidArgument(f"{one.name} takes no body: nothing was done")
            if one.query is None and request.query_params:
                said = next(iter(request.query_params))
                raise InvalidArgument(f"{one.name} takes no {said[:60]!r} in its URL: nothing was done")
            if one.query is not None:
                arguments["query"] = msgspec.convert(dict(request.query_params), one.query, strict=False)
            answer = await one.handler(
                Call(client, leasing, homes, scrape, identity, request, content, room, rates), **arguments
            )
        except msgspec.MsgspecError as error:
            return problem(400, InvalidArgument.code, str(error))
        except UnicodeDecodeError as error:
            return problem(400, InvalidArgument.code, f"the request is not UTF-8: {error}")
        except BrokerError as error:
            return problem_of(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        finally:
            content.release()
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=one.status)
        return Response(msgspec.json.encode(answer), one.status, media_type=JSON)

    return endpoint


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


# Of what everybody sees a part, and of what concerns nobody else.
_FOR_ALL = {"info", "topics"}
_TOPIC_INSIDE = {"create_topic"}  # the body names the topic: the handler asks for the right to that


async def _identify(one: Operation, access: AccessControl, request: Request) -> Identity:
    """Return who asks. Raises Unauthorized or Forbidden unless they may."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    identity = await access.identify(token.strip() if kind.lower() == "bearer" else "")
    if one.name in _TOPIC_INSIDE:
        identity.require_somewhere(one.action)
    elif one.name not in _FOR_ALL:
        identity.require(one.action, request.path_params.get("topic"))
    return identity


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, InvalidArgument.code)
    detail = error.detail
    if error.status_code == 404:
        detail = f"there is nothing at {request.url.path}; /openapi.json lists what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        detail = f"{request.method} is not possible at {request.url.path}; {allowed} is"
    return problem(error.status_code, code, detail, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a bug while %s %s was answered", request.method, request.url.path, exc_info=error)
    return problem(500, BrokerError.code, "the broker failed; its log says how")
