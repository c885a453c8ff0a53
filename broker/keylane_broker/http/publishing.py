"""Publishing: JSON with one or many messages, a body as it is, or a stream of lines."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
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
from keylane.payloads.store import gathered
from keylane.produce.outgoing import StoredBody, check_texts, sort
from keylane_broker.http import values
from keylane_broker.http.bodies import bodies_of, stream
from keylane_broker.http.operations import Call, operation
from keylane_broker.http.problems import problem_of

LINES = "application/x-ndjson"
ANYTHING = "application/octet-stream"
_ATTRIBUTE = "keylane-attribute-"
_SETTINGS = tuple(
    f"keylane-{name}" for name in ("key", "partition", "delay", "durability", "ttl", "priority")
)
_EVENT = "ce-"  # headers of a CloudEvent in binary mode
_TRACE = ("traceparent", "tracestate")  # which trace a request is of: its messages say so
_AT_ONCE = 500  # lines of a stream
_LINE = 1_048_576  # bytes of one
_SHOWN = 100  # failures

N = TypeVar("N", int, float)

_decode = msgspec.json.Decoder(values.NewMessages).decode
_decode_line = msgspec.json.Decoder(values.NewMessage).decode


@operation("POST", "/v1/topics/{topic}/messages", takes=(ANYTHING, LINES))
async def publish(call: Call, body: values.NewMessages) -> values.Results | values.Streamed | Response:
    """Publish messages: one or many as JSON, one whose body is that of the request, or a line for each.

    With the header Idempotency-Key they are published once, however often the request is repeated.
    """
    request, topic = call.request, call.topic
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    key = request.headers.get("idempotency-key")
    if kind == LINES:
        return await _publish_lines(call, key)
    if kind in ("application/json", ""):
        said = _decode(await call.content.read())
        messages = [_outgoing(one, key, place) for place, one in enumerate(said.messages)]
        call.rates.take(call.identity, len(messages))
    else:
        return await _publish_as_it_is(call, kind)
    return _results(await _publish(call, topic, messages))


async def _publish_as_it_is(call: Call, kind: str) -> values.Results | Response:
    """Publish the content of a request; what is longer than a part goes to the payload store as it comes."""
    message = _as_it_is(call, b"", kind)
    call.rates.take(call.identity, 1)
    parts = gathered(stream(call))
    first, second = await anext(parts, b""), await anext(parts, b"")
    if not second:
        message = msgspec.structs.replace(message, data=first)
        return _results(await _publish(call, call.topic, [message]))
    # Before anything is stored: whatever can be said against the message.
    owners = (await call.client._cluster.map(call.topic)).owners
    check_texts(sort([message], max(1, len(owners)), "")[0].flat)
    [name] = ksuid.take(1, call.client._cluster.drift)
    async with call.room.transfers:
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
    return values.Result(code=getattr(answer, "code", BrokerError.code), detail=str(answer))


def _outgoing(one: values.NewMessage, key: str | None, place: int) -> OutgoingMessage:
    if one.data is not None and one.data_base64 is not None:
        raise InvalidArgument("a message has data and data_base64: use one of them")
    return OutgoingMessage(
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
    )


def _uid(key: str | None, place: int) -> str | None:
    """Return what identifies a message of a request that may be repeated."""
    if key is None:
        return None
    return f"{key}.{place}" if place else key


def _as_it_is(call: Call, body: bytes, kind: str) -> OutgoingMessage:
    """A message whose body is the request's; its key and attributes are headers."""
    headers = call.request.headers
    attributes = dict(_attributes(headers.items()))
    if kind:
        attributes.setdefault("content-type", headers["content-type"])
    event = attributes.get("ce-id") if "ce-source" in attributes else None
    for name in headers:
        if name.startswith("keylane-") and not name.startswith(_ATTRIBUTE) and name not in _SETTINGS:
            raise InvalidArgument(f"no header {name[:60]!r}: use {', '.join(_SETTINGS)} or {_ATTRIBUTE}…")
    return OutgoingMessage(
        body,
        headers.get("keylane-key") or attributes.get("ce-partitionkey"),
        attributes,
        _number(headers, "keylane-partition", int),
        headers.get("idempotency-key") or event,
        headers.get("keylane-durability"),
        _number(headers, "keylane-delay", float),
        ttl=_number(headers, "keylane-ttl", float),
        priority=_number(headers, "keylane-priority", int),
    )


def _number(headers: Mapping[str, str], name: str, kind: type[N]) -> N | None:
    try:
        return kind(headers[name]) if name in headers else None
    except ValueError:
        what = "a number of seconds" if kind is float else "a whole number"
        raise InvalidArgument(f"{name} is {headers[name][:60]!r}: use {what}") from None


def _attributes(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in headers:
        if name.startswith(_ATTRIBUTE):
            yield name.removeprefix(_ATTRIBUTE), value
        elif name.startswith(_EVENT):
            yield name, unquote(value)  # as the binding of CloudEvents to HTTP says


async def _publish_lines(call: Call, key: str | None) -> values.Streamed:
    """Publish lines as they come: never more of them in memory than are published at once."""
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
                said = _result(answer)
                failures.append(values.Failure(line, said.code or "", said.detail or ""))
        del failures[_SHOWN:]
        some.clear()

    async for line in _lines(stream(call)):
        number += 1
        if not line.strip():
            continue
        try:
            some.append((number, _outgoing(_decode_line(line), key, number - 1)))
        except (msgspec.MsgspecError, BrokerError) as error:
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


async def _lines(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in stream:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE:
            raise MessageTooLarge(f"a line has more than {_LINE} bytes")
        for line in lines:
            yield line
    if rest:
        yield rest
