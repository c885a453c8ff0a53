"""The way to Redis: runs scripts, reads logs, and turns Redis trouble into named errors."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
    TryAgainError,
)

from keylane.errors import BrokerError, InvalidArgument, Unavailable
from keylane.redis.errors import LOST
from keylane.redis.urls import open_client
from keylane.wire import lines
from keylane_broker.store import durability, events
from keylane_broker.store.connection import OnAnswer, SharedConnection, named_error, named_errors
from keylane_broker.store.libraries import LIBRARIES, Library
from keylane_broker.store.scripts import Script, Scripts
from keylane_broker.store.servers import Argument, Servers

Call = tuple[str, Sequence[str], Sequence[Argument]]  # script, keys, arguments

_Way = tuple[str, str]  # a command that calls a script, and the script's name there

# What a server answers that has not done what it was asked.
_NOT_DONE = (NoScriptError, MovedError, AskError, TryAgainError, OutOfMemoryError)
_ORDINARY_US = 50  # that a script takes which is not measured
_VERSIONS = 8  # of which libraries stay: each takes some 800 KB of the server's memory
_PATIENCE = 10.0  # seconds without any answer until a connection counts as dead
_CONNECT = 5.0  # seconds for each step of connecting
_ACQUIRE = "partition/acquire_lease"
_WITHOUT_LEASE = {_ACQUIRE, "partition/delete"}  # that need none, though they name it first

_BULK = {"partition/renew_leases", "partition/release_leases"}  # whose keys are leases, all of them


class Store(Servers):
    """Runs the scripts on a single server, behind Sentinel, or on a cluster.

    Nothing is retried: an ack that was carried out and then repeated would be answered "stale", so callers
    decide what to repeat.
    """

    def __init__(
        self,
        redis: "Redis | RedisCluster",
        scripts: Scripts | None = None,
        *,
        patience: float = _PATIENCE,
        shared: bool = False,
        another: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(redis, patience=patience, shared=shared, another=another)
        self.scripts = scripts or Scripts()
        self._calls_functions = shared  # until a server forbids it
        self._loading: set[SharedConnection] = set()
        self._spent: dict[str, int] = defaultdict(int)

    @classmethod
    def connect(cls, url: str, scripts: Scripts | None = None, *, patience: float = _PATIENCE) -> "Store":
        """Prepare a store; connections are opened when they are needed."""

        def another() -> Any:
            return open_client(url, min(_CONNECT, patience), decode_responses=True)

        try:
            return cls(another(), scripts, patience=patience, shared=True, another=another)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """Run one script, loading it where the server does not know it yet."""
        called = self.scripts[script]
        how: dict[str, Any] = {
            "leases": leases_of(script, keys, arguments),
            "takes": keys[0] if script == _ACQUIRE else None,
            "urgent": script in _BULK,
        }
        began = self.counters.now()
        way, call = self._way(called), (len(keys), *keys, *arguments)
        with named_errors():
            try:
                answer = await self.execute(keys[0], *way, *call, **how)
            except ResponseError as error:
                await self._make_known(error, way, keys[0])
                answer = await self.execute(keys[0], "EVAL", called.text, *call, **how)
        self.counters.script_ran(script, began)
        if called.measured:
            self._spent[keys[0]] += answer.pop()
        return answer  # type: ignore[no-any-return]

    def _way(self, called: Script) -> _Way:
        """Return how a script is called by a name that the server knows, or is to know."""
        if called.function and self._calls_functions:
            return "FCALL", called.function
        return "EVALSHA", called.sha

    async def prepare(self, connection: SharedConnection) -> None:
        """Load the library where it is not known, before anything is called there."""
        library = self.scripts.library
        if library is None or not self._calls_functions:
            return
        try:
            if not await connection.call("FUNCTION", "LIST", "LIBRARYNAME", library.name):
                await connection.call(*_load_command(library))
                await self._drop_old_ones(connection, library)
        except ResponseError as error:
            self._loaded(error)

    async def _drop_old_ones(self, connection: SharedConnection, library: Library) -> None:
        """Delete the libraries of other versions when there are many; one that is in use is loaded again."""
        found = await connection.call("FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARIES}*")
        names = [as_fields(one)["library_name"] for one in found]
        if len(names) <= _VERSIONS:
            return
        with contextlib.suppress(ResponseError):  # it is not allowed, or another was faster
            for name in names:
                if name != library.name:
                    await connection.call("FUNCTION", "DELETE", name)

    async def _make_known(self, error: ResponseError, way: _Way, key: str) -> None:
        """See to it that the next call in this way succeeds; raise the error if it is about something else.

        A script by its digest is known as soon as it has been called by its text.
        """
        if not (isinstance(error, NoScriptError) or self._forbids(error, way)):
            raise error
        if way[0] == "FCALL":
            self._load(self.connections.get(await self.server_of(key)))

    def _load(self, connection: SharedConnection | None) -> None:
        """Load the library that has vanished, for the calls to come: those under way are not to wait."""
        if connection is None or connection in self._loading or self.scripts.library is None:
            return

        def loaded(answer: Any) -> None:
            self._loading.discard(connection)
            self._loaded(answer)

        self._loading.add(connection)
        connection.post(_load_command(self.scripts.library), loaded)

    def _loaded(self, answer: Any) -> None:
        """Call no functions any more where they cannot be loaded, unless another was first."""
        lasts = isinstance(answer, (NoPermissionError, OutOfMemoryError)) or str(answer).startswith("ERR ")
        if isinstance(answer, ResponseError) and lasts and not str(answer).endswith("already exists"):
            self._calls_functions = False

    def _forbids(self, answer: Exception, way: _Way) -> bool:
        """Return whether an answer says that functions cannot be called: none is from then on."""
        forbids = isinstance(answer, NoPermissionError) or str(answer).startswith("ERR unknown command")
        if way[0] != "FCALL" or not forbids:
            return False
        self._calls_functions = False
        return True

    def post(self, connection: SharedConnection, call: Call, on_answer: OnAnswer) -> None:
        """Run a script under a lease, where route() says, in this turn of the event loop; wait for nothing.

        `on_answer` hears what it answers; None where it was not carried out, so that the call can be made
        in another way; or an error.
        """
        script, keys, arguments = call
        called, began = self.scripts[script], self.counters.now()
        way = self._way(called)

        def answered(answer: Any) -> None:
            if not isinstance(answer, Exception):
                self.counters.script_ran(script, began)
                self._spent[keys[0]] += answer.pop() if called.measured else _ORDINARY_US
                on_answer(answer)
            elif isinstance(answer, _NOT_DONE) or self._forbids(answer, way):
                if isinstance(answer, NoScriptError) and connection.usable:
                    # For the next time: made again now it would be behind what was sent after it.
                    if way[0] == "FCALL":
                        self._load(connection)
                    else:
                        connection.post(("SCRIPT", "LOAD", called.text), _ignore)
                on_answer(None)
            else:
                if isinstance(answer, LOST):
                    self.lose(connection.server, connection, answer)
                on_answer(named_error(answer))

        connection.post((*way, len(keys), *keys, *arguments), answered)

    async def run_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Run many scripts at once; each server gets its share in one go."""
        return await _together(*(self.run(script, keys, *arguments) for script, keys, arguments in calls))

    async def try_all(self, calls: Sequence[Call], patience: float) -> list[list[Any] | BrokerError]:
        """Run many scripts of which each may fail, or take too long, by itself; raises only if all do."""

        async def attempt(call: Call) -> list[Any] | BrokerError:
            try:
                async with asyncio.timeout(patience):
                    return await self.run(call[0], call[1], *call[2])
            except BrokerError as error:
                return error
            except TimeoutError:
                return Unavailable(f"Redis has not answered in {patience:g} s")

        answers = await asyncio.gather(*(attempt(call) for call in calls))
        errors = [answer for answer in answers if isinstance(answer, BrokerError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers

    async def run_durably(
        self, level: str, timeout_ms: int, script: str, keys: Sequence[str], *arguments: Argument
    ) -> list[Any]:
        """Run a script and wait until its writes are as safe as asked: fsync, replicated, replicated:N."""
        if level == "memory":
            return await self.run(script, keys, *arguments)
        called = self.scripts[script]
        leases = leases_of(script, keys, arguments)
        with named_errors():
            wait = await durability.wait_command(self, level, timeout_ms, keys[0])
            if wait is None:
                return await self.run(script, keys, *arguments)
            way, call = self._way(called), (len(keys), *keys, *arguments)
            try:
                answer, reached = await durability.run_and_wait(self, keys[0], (*way, *call), wait, leases)
            except ResponseError as error:
                await self._make_known(error, way, keys[0])
                way = ("EVAL", called.text)
                answer, reached = await durability.run_and_wait(self, keys[0], (*way, *call), wait, leases)
        if called.measured:
            self._spent[keys[0]] += answer.pop()
        if answer[0] == "OK":
            durability.check_reached(level, int(wait[1]), timeout_ms, reached)
        return list(answer)

    async def require(self, level: str, key: str) -> None:
        """Raise DurabilityNotReached where a level is out of reach of the server that holds a key."""
        with named_errors():
            await durability.require(self, level, key)

    def groups(self, keys: Sequence[str], limit: int) -> list[list[int]]:
        """Return the places of keys that one script may take together: on a cluster those of a slot."""
        by_slot: dict[int, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            by_slot[key_slot(key.encode()) if self.clustered else 0].append(index)
        return [places[at : at + limit] for places in by_slot.values() for at in range(0, len(places), limit)]

    def take_spent(self) -> dict[str, int]:
        """Return the microseconds that scripts took in Redis, by their first key, since the last call."""
        spent, self._spent = self._spent, defaultdict(int)
        return spent

    async def entries(self, log: str, ranges: Sequence[tuple[str, str]]) -> list[list[Any]]:
        """Read ranges of a log: for each a list of `[id, [field, value, …]]`."""
        with named_errors():
            if len(ranges) == 1:
                return [await self.execute(log, "XRANGE", log, *ranges[0])]
            return await _together(*(self.execute(log, "XRANGE", log, *bounds) for bounds in ranges))

    async def read_all(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Run plain commands, each on the key that it names first; returns their answers as the server's."""
        with named_errors():
            return await _together(*(self.execute(command[1], *command) for command in commands))

    async def read_raw(self, *command: str) -> bytes:
        """Run a plain command on the key that it names first, and return its answer as it came."""
        with named_errors():
            if self.shared:
                with contextlib.suppress(MovedError, AskError, TryAgainError):
                    return await self.run_raw(*command)
            return lines.pack(await self.execute(command[1], *command))

    async def fields(self, key: str) -> dict[str, str]:
        """Return all fields of a hash."""
        [found] = await self.all_fields([key])
        return found

    async def all_fields(self, keys: Sequence[str]) -> list[dict[str, str]]:
        """Return all fields of each of some hashes."""
        return [as_fields(found) for found in await self.read_all([("HGETALL", key) for key in keys])]

    async def atomically(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run plain commands on the keys of one partition as one transaction; returns as read_all()."""
        with named_errors():
            if self.shared:
                key, wrapped = str(commands[0][1]), [("MULTI",), *commands, ("EXEC",)]
                try:
                    *_, answers = await self.run_alone(key, wrapped)
                except MovedError:  # nothing was done, and now it is known where to
                    *_, answers = await self.run_alone(key, wrapped)
                if isinstance(answers, Exception):
                    raise answers
            else:
                self.begin()
                pipeline = self.redis.pipeline(transaction=True)
                for command in commands:
                    pipeline.execute_command(*command)
                async with self._permits:
                    answers = await pipeline.execute()
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return list(answers)

    async def command(self, *command: Argument) -> Any:
        """Run one plain command the way redis-py does, and return its answer."""
        with named_errors():
            return await self.by_redis_py(*command)

    async def field_of_each(self, keys: Sequence[str], field: str = "state") -> list[str | None]:
        """Return one field of many hashes."""
        with named_errors():
            return await _together(*(self.execute(key, "HGET", key, field) for key in keys))

    async def keys_like(self, pattern: str) -> set[str]:
        """Return all keys that match a pattern, found by scanning."""
        with named_errors():
            self.begin()
            async with self._permits:
                return {key async for key in self.redis.scan_iter(match=pattern, count=1_000)}

    async def say(self, channel: str, text: str) -> None:
        """Publish on a channel."""
        with named_errors():
            await events.say(self, channel, text)

    def listen(self, channel: str, on_message: Callable[[str], None]) -> Coroutine[Any, Any, None]:
        """Pass on what is published on a channel until cancelled; "" whenever some may have been missed."""
        return events.listen(self, channel, on_message)


def leases_of(script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Sequence[str]:
    """Return the keys of the leases under which a script runs: they come first, then what is held of them.

    An operator holds none.
    """
    if not keys[0].endswith(":lease") or not arguments[0] or script in _WITHOUT_LEASE:
        return ()
    return keys if script in _BULK else keys[:1]


def _load_command(library: Library) -> tuple[str, str, str]:
    return ("FUNCTION", "LOAD", library.text)


def _ignore(answer: Any) -> None:
    """Take no notice of an answer."""


async def _together(*calls: Any) -> list[Any]:
    """Await all calls; the first error is raised when all are done, so none is left alone."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def as_fields(answer: Any) -> dict[str, str]:
    """Return what HGETALL answers, as the server or as redis-py puts it, as a dict."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
