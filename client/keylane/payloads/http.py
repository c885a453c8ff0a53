"""Bodies by HTTP: workers keep them in their store, for clients that have no business there.

`keylane+http://` and `keylane+https://` mean the workers that the client knows, who say in INFO where they
speak HTTP; with a host it is only that one, such as a load balancer in front of them.
"""

import asyncio
import itertools
import random
import ssl
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import h11
import msgspec

from keylane.errors import BrokerError, InvalidArgument, Overloaded, PayloadMissing, Unavailable, error_named
from keylane.payloads.http_connection import HttpConnection
from keylane.payloads.store import PayloadStore
from keylane.threads import in_thread

_AT_ONCE = 16  # requests under way, each with a connection of its own
_TOGETHER = 1024 * 1024  # bytes of bodies in one request; larger ones go alone
_CONNECT = 2.0  # seconds
_ANSWER = 30.0  # seconds without any progress
_PATIENCE = 5.0  # seconds in which workers may restart without anybody noticing
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between attempts; the last one repeats
_PORTS = {"keylane+http": 8080, "keylane+https": 8080}
_SHOWN = 65_536  # bytes of an answer that is an error
_JSON, _BYTES = "application/json", "application/octet-stream"
_LOST = (OSError, TimeoutError, h11.RemoteProtocolError, h11.LocalProtocolError, EOFError)

Address = tuple[str, int]
_decode = msgspec.msgpack.Decoder(list[bytes | bool | None]).decode


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""


class HttpStore(PayloadStore):
    """Bodies in the store of the workers, by way of these."""

    def __init__(self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        scheme, _, place = url.partition("://")
        if "@" in place:  # not shown: there may be a password in it
            raise InvalidArgument("a payload store of workers takes a token, and no user or password")
        self._url = url
        self._secure = scheme == "keylane+https"
        self._tls = tls
        self._token = token
        self._fixed = bool(place.strip("/"))
        self._known: dict[Address, None] = dict.fromkeys(_addresses(url, _PORTS[scheme]))
        self._idle: dict[Address, list[HttpConnection]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._closed = False

    def learn(self, address: str) -> None:
        """A worker says where it speaks HTTP."""
        if address and not self._fixed:
            self._known.update(dict.fromkeys(_addresses(f"keylane+http://{address}", 0)))

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies under their names; all are stored when this returns."""
        calls = []
        for some in _slices(bodies):
            if len(some) == 1:
                [(name, body)] = some
                calls.append(self._ask("PUT", f"{topic}/{name}", body, _BYTES))
            else:
                calls.append(self._ask("POST", topic, msgspec.msgpack.encode(some), _BYTES))
        await _all(calls)

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies, in the order of `names`; None for each that is missing."""
        if len(names) == 1:
            return [await self._get_alone(topic, names[0])]
        found: list[bytes | None] = []
        while len(found) < len(names):
            said = msgspec.json.encode({"names": names[len(found) :]})
            some = _decode(await self._ask("POST", f"{topic}/read", said, _JSON))
            if not some:
                raise Unavailable("a worker has answered with none of the bodies asked for")
            alone = [names[len(found) + place] for place, body in enumerate(some) if body is True]
            large = iter(await _all([self._get_alone(topic, name) for name in alone]))
            found += [next(large) if isinstance(body, bool) else body for body in some]
        return found

    async def _get_alone(self, topic: str, name: str) -> bytes | None:
        try:
            return await self._ask("GET", f"{topic}/{name}")
        except PayloadMissing:
            return None

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return which bodies exist, in the order of `names`."""
        if not names:
            return []
        answer = await self._ask("POST", f"{topic}/has", msgspec.json.encode({"names": names}), _JSON)
        found: list[bool] = msgspec.json.decode(answer)["found"]
        return found

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies; missing ones are not an error."""
        if names:
            await self._ask("POST", f"{topic}/delete", msgspec.json.encode({"names": names}), _JSON)

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return when bodies are as safe as the workers' store can make them."""
        await self._ask("POST", f"{topic}/sync", msgspec.json.encode({"names": names}), _JSON)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        idle, self._idle = self._idle, {}
        for connection in itertools.chain.from_iterable(idle.values()):
            connection.drop()

    # Requests

    async def _ask(self, method: str, path: str, content: bytes = b"", kind: str = "") -> bytes:
        """Ask a worker, and another one while some do not answer; all of it can be repeated."""
        end = asyncio.get_running_loop().time() + _PATIENCE
        pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        headers = [("Content-Type", kind)] if kind else []
        if self._token:
            headers.append(("Authorization", f"Bearer {self._token}"))
        while True:
            address = self._choose()
            try:
                async with self._room:
                    return await self._ask_at(address, method, f"/v1/bodies/{path}", headers, content)
            except _LOST as error:
                self._forget(address)
                failed: BrokerError = Unavailable(f"{self._name(address)} cannot be reached: {_why(error)}")
                failed.__cause__ = error
            except (Unavailable, Overloaded) as error:  # its Redis is away, it stops, or has no room
                failed = error
            pause = max(next(pauses), getattr(failed, "retry_after", 0.0))
            if self._closed or asyncio.get_running_loop().time() + pause > end:
                raise failed
            await asyncio.sleep(pause)

    async def _ask_at(
        self, address: Address, method: str, target: str, headers: list[tuple[str, str]], content: bytes
    ) -> bytes:
        connection = await self._connection(address)
        try:
            said = [("Host", f"{_bracketed(address[0])}:{address[1]}"), *headers]
            status = await connection.ask(method, target, said, content)
            answer = b"".join([part async for part in connection.content()])
        except BaseException:
            connection.drop()
            raise
        if connection.usable and not self._closed:
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.drop()
        if status >= 400:
            raise self._error(address, status, answer, connection.headers.get("retry-after", ""))
        return answer

    def _error(self, address: Address, status: int, answer: bytes, retry_after: str) -> BrokerError:
        try:
            said = msgspec.json.decode(answer[:_SHOWN], type=_Problem)
        except msgspec.MsgspecError:
            said = _Problem()
        if not said.code:  # it comes from something else, on the way there
            text = f"{self._name(address)} answers with status {status}"
            return Unavailable(text) if status >= 500 else InvalidArgument(text)
        seconds = float(retry_after) if retry_after.isdecimal() else 0.0
        return error_named(said.code, said.detail, retry_after=seconds)

    def _choose(self) -> Address:
        if not self._known:
            raise Unavailable(
                f"no worker says where it takes bodies ({self._url}): they need an HTTP port (--http-port)"
            )
        idle = [address for address, some in self._idle.items() if some and address in self._known]
        return random.choice(idle or list(self._known))

    def _forget(self, address: Address) -> None:
        """A worker does not answer: it may be another one's turn; it will be learnt again when it greets."""
        for connection in self._idle.pop(address, []):
            connection.drop()
        if len(self._known) > 1:
            self._known.pop(address, None)

    async def _connection(self, address: Address) -> HttpConnection:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.drop()
        if self._secure and self._tls is None:
            self._tls = await in_thread(ssl.create_default_context)
        tls = self._tls if self._secure else None
        return await HttpConnection.open(*address, tls, within=_CONNECT, patience=_ANSWER)

    def _name(self, address: Address) -> str:
        return f"the payload store of the worker at {_bracketed(address[0])}:{address[1]}"


async def _all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Wait for all calls, then raise the first error among them."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _slices(bodies: Sequence[tuple[str, bytes]]) -> Iterator[Sequence[tuple[str, bytes]]]:
    """Cut bodies into requests."""
    some, size = list[tuple[str, bytes]](), 0
    for name, body in bodies:
        if len(body) > _TOGETHER // 4:
            yield [(name, body)]
            continue
        if size + len(body) > _TOGETHER:
            yield some
            some, size = [], 0
        some.append((name, body))
        size += len(body)
    if some:
        yield some


def _addresses(url: str, default: int) -> Iterator[Address]:
    for place in url.partition("://")[2].strip("/").split(","):
        if place:
            host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
            if not colon:
                host, port = place, str(default)
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise InvalidArgument(
                    f"{url!r:.80} is not where workers take bodies: use keylane+http://host:port, or https"
                )
            yield host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
