"""Publishing: JSON with one or many messages, a body as it is, or a stream of lines."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import TypeVar
from urllib.parse import unquote

import msgspec
from starlette.responses import Response

from keylane import (
    BrokerError,
    InvalidArgument,
    MessageTooLarge,
    OutgoingMessage,
    Overloaded,
    Published,
    PublishFailed,
    ksuid,
)
from keylane.payloads.store import PART, gathered
from keylane.produce.outgoing import GroupedMessage, StoredBody, check_texts, sort
from keylane.wire.limits import MAX_UID
from keylane_broker.http import values
from keylane_broker.http.bodies import bodies_of
from keylane_broker.http.operations import Call, operation
from keylane_broker.http.problems import problem_of
from keylane_broker.http.room import Content

LINES = "application/x-ndjson"
ANYTHING = "application/octet-stream"
_ATTRIBUTE = "keylane-attribute-"
_SETTINGS = tuple(
    f"keylane-{name}"
    for name in (
        *("key", "partition", "delay", "deliver-at", "durability", "ttl", "expires-at", "priority"),
        "producer-group",
    )
)
_EVENT = "ce-"  # headers of a CloudEvent in binary mode
_TRACE = ("traceparent", "tracestate")  # which trace a request is of: its messages say so
_AT_ONCE = 500  # lines of a stream
_LINE = 1_048_576  # bytes of one
_SHOWN = 100  # failures

N = TypeVar("N", int, float)

_NUMBERED = re.compile(r".*\.\d+", re.DOTALL).fullmatch  # a key that ends as if it were one with a place

_decode = msgspec.json.Decoder(values.NewMessages).decode
_OBJECTS = 2 * values.MOST_MESSAGES + 1  # in a request: each message, its attributes, and what is around them
_OBJECT = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|({)', re.DOTALL)  # or a text, which may have anything in it
_decode_line = msgspec.json.Decoder(values.NewMessage).decode


@operation("POST", "/v1/topics/{topic}/messages", takes=(ANYTHING, LINES))
async def publish(call: Call, body: values.NewMessages) -> values.Results | values.Streamed | Response:
    """Publish messages: one or many as JSON, one whose body is that of the request, or a line for each.

    With the header Idempotency-Key they are published once, however often the request is repeated.
    """
    request, topic = call.request, call.topic
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    key = _idempotency_key(request.headers)
    if any(name.startswith(_EVENT) for name in request.headers):  # its type is that of its data, often JSON
        return await _publish_as_it_is(call, kind, key)
    if kind in (LINES, "application/json", "") and (
        header := next((name for name in request.headers if name.startswith("keylane-")), None)
    ):
        raise InvalidArgument(
            f"the header {header[:60]!r} is for a body that is the message: in JSON each message says "
            "itself what it has, such as key, delay and attributes"
        )
    if kind == LINES:
        return await _publish_lines(call, key)
    if kind in ("application/json", ""):
        said = decoded(await call.content.read())
        messages = [_outgoing(one, key, place) for place, one in enumerate(said.messages)]
        call.rates.take(call.identity, len(messages))
    else:
        return await _publish_as_it_is(call, kind, key)
    return _results(await _publish(call, topic, messages))


def decoded(content: bytes) -> values.NewMessages:
    """Return what JSON says. Raises InvalidArgument for too many messages, before there is one in memory.

    Three bytes are enough for a message: a request of millions would keep the worker busy for seconds.
    """
    if content.count(b"{") > _OBJECTS:
        objects = (found for found in _OBJECT.finditer(content) if found[1])
        if next(islice(objects, _OBJECTS, None), None):
            raise InvalidArgument(f"more than {values.MOST_MESSAGES} messages in a request: use several")
    return _decode(content)


async def _publish_as_it_is(call: Call, kind: str, key: str | None) -> values.Results | Response:
    """Publish the content of a request; what is longer than a part goes to the payload store as it comes."""
    message = _as_it_is(call, kind, key)
    call.rates.take(call.identity, 1)
    parts = gathered(call.content.stream_counted(2 * PART))
    first, second = await anext(parts, b""), await anext(parts, b"")
    if not second:
        message = msgspec.structs.replace(message, data=first)
        return _results(await _publish(call, call.topic, [message]))
    # Before anything is stored: whatever can be said against the message.
    owners = (await call.client._cluster.map(call.topic)).owners
    check_texts(sort([message], max(1, len(owners)), "")[0].flat)
    [name] = ksuid.take(1, call.client._cluster.drift)
    async with call.room.transfer(call.identity):
        size = await bodies_of(call).write(
            call.topic, name, _behind(first, second, parts), message.durability
        )
    message = msgspec.structs.replace(message, data=StoredBody.of(name, size))
    return _results(await _publish(call, call.topic, [message]))


async def _behind(first: bytes, second: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    yield second
    async for part in rest:
        yield part


async def _publish(call: Call, topic: str, messages: list[OutgoingMessage]) -> list[Published | Exception]:
    headers = call.request.headers
    if trace := {name: headers[name] for name in _TRACE if name in headers}:
        messages = [
            msgspec.structs.replace(one, attributes={**trace, **(one.attributes or {})}) for one in messages
        ]
    try:
        return list(await call.client.publish_many(topic, messages))
    except PublishFailed as failed:
        return list(failed.published)


def _results(answers: list[Published | Exception]) -> values.Results | Response:
    failed = [answer for answer in answers if isinstance(answer, BrokerError)]
    if len(failed) == len(answers) == 1:
        return problem_of(failed[0])
    results = values.Results([_result(answer) for answer in answers])
    if not failed:
        return results
    return Response(msgspec.json.encode(results), 207, media_type="application/json")


def _result(answer: Published | Exception) -> values.Result:
    if isinstance(answer, Published):
        return values.Result(
            answer.id,
            answer.partition,
            answer.uid,
            answer.durability,
            answer.duplicate,
            answer.no_subscribers,
            answer.delayed,
        )
    code, detail = _wrong(answer)
    return values.Result(code=code, detail=detail)


def _wrong(answer: Exception) -> tuple[str, str]:
    return getattr(answer, "code", BrokerError.code), str(answer)


def _outgoing(one: values.NewMessage, key: str | None, place: int) -> OutgoingMessage:
    if one.data is not None and one.data_base64 is not None:
        raise InvalidArgument("a message has data and data_base64: use one of them")
    return GroupedMessage(
        one.data if one.data_base64 is None else one.data_base64,
        one.key,
        one.attributes,
        one.partition,
        one.uid or _uid(key, place),
        one.durability,
        one.delay,
        one.deliver_at,
        one.ttl,
        one.expires_at,
        one.priority,
        one.producer_group or "",
    )


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    if "idempotency-key" not in headers:
        return None
    if not headers["idempotency-key"]:  # all requests that have it would be one
        raise InvalidArgument("Idempotency-Key is empty: leave it out, or use text that no other request has")
    return _text(headers["idempotency-key"])


def _uid(key: str | None, place: int) -> str | None:
    """Return what identifies a message of a request that may be repeated: no other request has the same."""
    if key is None:
        return None
    return f"{key}.{place}" if place or _NUMBERED(key) else key


def _as_it_is(call: Call, kind: str, key: str | None) -> OutgoingMessage:
    """A message whose body will be the request's; its key and attributes are headers."""
    headers = call.request.headers
    attributes = dict(_attributes(headers.items()))
    if kind:
        attributes.setdefault("content-type", headers["content-type"])
    for name in headers:
        if name.startswith("keylane-") and not name.startswith(_ATTRIBUTE) and name not in _SETTINGS:
            raise InvalidArgument(f"no header {name[:60]!r}: use {', '.join(_SETTINGS)} or {_ATTRIBUTE}…")
    return GroupedMessage(
        b"",
        _text(headers.get("keylane-key", "")) or attributes.get("ce-partitionkey"),
        attributes,
        _number(headers, "keylane-partition", int),
        _event_uid(attributes) if key is None else key,
        headers.get("keylane-durability"),
        _number(headers, "keylane-delay", float),
        _instant(headers, "keylane-deliver-at"),
        _number(headers, "keylane-ttl", float),
        _instant(headers, "keylane-expires-at"),
        _number(headers, "keylane-priority", int),
        _text(headers.get("keylane-producer-group", "")),
    )


def _event_uid(attributes: Mapping[str, str]) -> str | None:
    """Return what a CloudEvent is known by: its id counts only among those of its source."""
    if not attributes.get("ce-id") or not attributes.get("ce-source"):
        return None
    uid = f"{attributes['ce-source']} {attributes['ce-id']}"
    return uid if len(uid.encode()) <= MAX_UID else hashlib.sha256(uid.encode()).hexdigest()


def _number(headers: Mapping[str, str], name: str, kind: type[N]) -> N | None:
    try:
        return kind(headers[name]) if name in headers else None
    except ValueError:
        what = "a number of seconds" if kind is float else "a whole number"
        raise InvalidArgument(f"{name} is {headers[name][:60]!r}: use {what}") from None


def _instant(headers: Mapping[str, str], name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(headers[name]) if name in headers else None
    except ValueError:
        raise InvalidArgument(
            f"{name} is {headers[name][:60]!r}: use a time such as 2026-11-18T09:00:00Z"
        ) from None


def _text(value: str) -> str:
    """Return a header as the same text in JSON would be: programs send UTF-8, and ASGI has read Latin-1."""
    return value.encode("latin-1").decode()


def _attributes(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in headers:
        if name.startswith(_ATTRIBUTE):
            yield name.removeprefix(_ATTRIBUTE), _text(value)
        elif name.startswith(_EVENT):
            yield name, unquote(_text(value))  # as the binding of CloudEvents to HTTP says


async def _publish_lines(call: Call, key: str | None) -> values.Streamed:
    """Publish lines as they come: never more of them in memory than come while others are published."""
    published, failures, number, failed = 0, list[values.Failure](), 0, 0
    some: list[tuple[int, OutgoingMessage]] = []

    async def send() -> None:
        nonlocal published, failed
        await _wait_for_turn(call, len(some))
        answers = await _publish(call, call.topic, [message for _, message in some])
        for (line, _), answer in zip(some, answers, strict=True):
            if isinstance(answer, Published):
                published += 1
            else:
                failed += 1
                failures.append(values.Failure(line, *_wrong(answer)))
        del failures[_SHOWN:]
        some.clear()

    async for lines in _lines(call.content):
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                some.append((number, _outgoing(_decode_line(line), key, number - 1)))
            except (msgspec.MsgspecError, UnicodeDecodeError, BrokerError) as error:
                failed += 1
                failures.append(values.Failure(number, InvalidArgument.code, str(error)))
                del failures[_SHOWN:]
            if len(some) >= _AT_ONCE:
                await send()
        if some:
            await send()
    return values.Streamed(published, failed, failures)


async def _wait_for_turn(call: Call, count: int) -> None:
    """Read no more of a stream than its token may publish."""
    while True:
        try:
            return call.rates.take(call.identity, count)
        except Overloaded as error:
            await asyncio.sleep(error.retry_after)


async def _lines(content: Content) -> AsyncIterator[list[bytes]]:
    """Yield the lines that have come, each time that some have; they count as long as they are here."""
    rest = b""
    async for chunk in content.stream_held():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE:
            raise MessageTooLarge(f"a line has more than {_LINE} bytes")
        yield lines
        content.hold(len(rest))
    if rest:
        yield [rest]
