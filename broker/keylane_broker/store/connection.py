"""Connections that many calls share: each call is written at once and answered in turn.

redis-py opens a connection (TLS, credentials, Sentinel); after that its share of a call, some 200 us
of Python, is more than Redis needs for a hundred messages. So the socket is handed over to this protocol:
commands are packed and replies parsed by hiredis, and nothing stands between.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

import hiredis
from redis.exceptions import (
    ConnectionError,
    DataError,
    InvalidResponse,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from keylane.errors import InvalidArgument, Unavailable
from keylane.redis.connection import pack, take_socket
from keylane.redis.errors import error_of, named
from keylane_broker.store.server_info import life_of

log = logging.getLogger("keylane.broker")


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Turn the trouble of Redis and redis-py into errors of ours."""
    try:
        yield
    except (DataError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"an argument cannot be sent to Redis: {error}") from error
    except NoPermissionError as error:
        raise Unavailable(f"Redis refuses the credentials: {error}") from error
    except InvalidResponse as error:
        raise Unavailable(f"what answers is not Redis: {error}") from error
    except (RedisError, RedisClusterException) as error:
        if (ours := named(error, "Redis")) is None:
            raise
        raise ours from error


def named_error(error: Exception) -> Exception:
    """Return the error of ours that trouble of Redis stands for, or the same."""
    try:
        with named_errors():
            raise error
    except Exception as ours:
        return ours


OnAnswer = Callable[[Any], None]  # hears an answer, or an exception


def _packed(command: Sequence[str | bytes | int]) -> bytes:
    try:
        packed: bytes = pack(command)
        return packed
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"an argument of {command[0]!r} cannot be sent to Redis: {error}") from error


def _answer(waiter: "asyncio.Future[Any] | OnAnswer", reply: Any) -> None:
    """Hand a reply to whoever waits for it."""
    if not isinstance(waiter, asyncio.Future):
        try:
            waiter(reply)
        except Exception:
            log.exception("a bug while an answer of Redis was taken in")
    elif waiter.done():  # its caller has given up
        return
    elif isinstance(reply, Exception):
        waiter.set_exception(reply)
    else:
        waiter.set_result(reply)


class Displaced(ConnectionError):
    """A new connection leads to another server than the one before."""


class Address(NamedTuple):
    """A server, by its name and by what knows how to connect to it: a pool or node of redis-py."""

    name: str
    source: Any


class SharedConnection(asyncio.Protocol):
    """A shared connection; calls are answered in the order in which they were made.

    A server that owes answers and sends none for `patience` seconds counts as gone.
    """

    def __init__(self, server: Address, writer: asyncio.StreamWriter, patience: float) -> None:
        self.server = server
        self.patience = patience
        self.on_lost: Callable[[], None] | None = None  # hears of its end before those who wait for answers
        self.life = ""  # of the server, when the connection was opened
        self.fsync: str | None = None  # how the server confirms fsync, once somebody has asked
        self.replicas = (0, 0.0)  # how many follow the server, and until when that is good to know
        self._writer = writer  # kept since it closes the transport when it goes
        self._transport: asyncio.Transport | None = writer.transport  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=error_of, encoding="utf-8")
        self._waiting: deque[asyncio.Future[Any] | OnAnswer] = deque()
        self._unread: list[bytes] | None = None  # what has come of an answer that is to be handed on as it is
        self._mark = b""  # and where it ends
        self.corked = False  # more commands are about to come: gather them
        self._unsent: list[bytes] = []
        self._answered = 0
        self._watch: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, server: Address, patience: float) -> "SharedConnection":
        """Let redis-py connect, then take its socket over."""
        connection = server.source.connection_class(**server.source.connection_kwargs)
        try:
            writer = await take_socket(connection)
        except NoPermissionError:
            raise
        except ResponseError as error:  # what it begins with, such as SELECT, is refused
            raise ConnectionError(str(error)) from error
        opened = cls(server, writer, patience)
        writer.transport.set_protocol(opened)
        return opened

    @property
    def peer(self) -> object:
        """The address of the server that it leads to."""
        return self._writer.get_extra_info("peername")

    async def learn_life(self) -> str:
        """Ask which life of the server this is; "" where it does not say."""
        with contextlib.suppress(RedisError):  # managed servers may forbid INFO
            return life_of(await self.call("INFO", "server", "replication"))
        return ""

    @property
    def usable(self) -> bool:
        """Whether calls can be made, here and now."""
        return self.is_open and self._loop is asyncio.get_running_loop()

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not self._waiting

    @property
    def is_open(self) -> bool:
        """Whether calls can be made, in its event loop."""
        return self._transport is not None and not self._transport.is_closing()

    def call(self, *command: str | bytes | int) -> "asyncio.Future[Any]":
        """Send a command; the future holds its answer."""
        packed = _packed(command)
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None:
            future.set_exception(ConnectionError("the connection is closed"))
            return future
        self._send(packed, future)
        return future

    def post(self, command: Sequence[str | bytes | int], on_answer: OnAnswer) -> None:
        """Send a command on a usable connection; `on_answer` hears its answer, or the exception instead.

        It costs a fraction of a future, and of the turn of the event loop that wakes whoever waits for one.
        """
        self._send(_packed(command), on_answer)

    def _send(self, packed: bytes, waiter: "asyncio.Future[Any] | OnAnswer") -> None:
        assert self._transport is not None
        self._waiting.append(waiter)
        if self.corked or len(self._waiting) > 1:
            # With others of this turn of the event loop: a system call costs more than a command.
            if not self._unsent:
                self._loop.call_soon(self.flush)
            self._unsent.append(packed)
        else:
            self._transport.write(packed)
        if self._watch is None:
            self._watch = self._loop.call_later(self.patience, self._look, self._answered)

    async def read_raw(self, *command: str | bytes | int) -> bytes:
        """Run a command on a connection that has nothing else to do, and return its answer as it came.

        Behind it comes an answer that nobody can know beforehand, so what ends with that is all.
        """
        word = token_hex(8)
        self._unread, self._mark = [], b"$%d\r\n%b\r\n" % (len(word), word.encode())
        try:
            answer: bytes = await self._call_marked(command, word)
        finally:
            self._unread = None
        if answer.startswith(b"-"):
            raise error_of(answer[1:].partition(b"\r\n")[0].decode("utf-8", "replace"))
        return answer

    def _call_marked(self, command: tuple[str | bytes | int, ...], word: str) -> "asyncio.Future[Any]":
        self.corked = True
        try:
            answer = self.call(*command)
            self._unsent.append(pack(("PING", word)))
        finally:
            self.flush()
        return answer

    def flush(self) -> None:
        """Send what was gathered."""
        self.corked = False
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def close(self, reason: str = "closed") -> None:
        """Close the connection; calls under way fail."""
        transport = self._transport
        self.connection_lost(ConnectionError(reason))
        if transport is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is no more
                transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand each complete reply to the call that it answers."""
        if self._unread is not None:
            self._gather(self._unread, data)
            return
        self._reader.feed(data)
        while self._transport is not None and (reply := self._reader.gets()) is not False:
            waiter = self._waiting.popleft()
            self._answered += 1
            _answer(waiter, reply)

    def _gather(self, parts: list[bytes], data: bytes) -> None:
        self._answered += 1
        parts.append(data)
        if len(data) < len(self._mark):
            parts[:] = [b"".join(parts)]  # the mark may come in pieces
        refused = parts[0].startswith(b"-") and b"\r\n" in parts[0]  # perhaps the mark was, too
        if self._waiting and (refused or parts[-1].endswith(self._mark)):
            _answer(self._waiting.popleft(), b"".join(parts).removesuffix(self._mark))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call that was not answered."""
        if self._transport is not None and self.on_lost is not None:
            self.on_lost()
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        error = ConnectionError(f"the connection to Redis was lost: {exc or 'closed by the server'}")
        while self._waiting:
            _answer(self._waiting.popleft(), error)

    def _look(self, answered: int) -> None:
        """Give up on a server that has answered nothing since the last look."""
        self._watch = None
        if not self._waiting:
            return
        if self._answered > answered:
            self._watch = self._loop.call_later(self.patience, self._look, self._answered)
        else:
            self.close(f"no answer for {self.patience:g} s")
