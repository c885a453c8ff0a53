"""The bodies of messages: where they are, and getting rid of those that nobody needs any more."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TypeVar

from keylane.errors import BrokerError, Forbidden, InvalidArgument, Overloaded
from keylane.payloads import PayloadStore, import_store, is_http, is_redis, open_store, public
from keylane.retry import backoff
from keylane.tasks import Tasks
from keylane.threads import in_thread
from keylane.wire import InfoReply
from keylane.wire.about import INLINE, WITHHELD, by_home, home_of, inline_body

_AT_ONCE = 1_000  # names in one call of the store
_TEND = 3_600.0  # seconds between two looks at a topic's bodies,
_TEND_FULL = 10.0  # and while the store has no room
_DOUBT = 1.0  # seconds in which a store that answers has carried out what it was sent before
_MAX_PENDING = 100_000  # bodies that wait to be deleted while the store is away
_LIFETIME = 7 * 24 * 3600.0  # seconds, where the cluster does not say
_log = logging.getLogger("keylane.client")

T = TypeVar("T", bytes | None, bool)


class Bodies:
    """The payload store of a client: its own, or the one that the cluster names in each greeting."""

    def __init__(
        self,
        payloads: PayloadStore | str | None,
        greeting: Callable[[], Awaitable[InfoReply]],
        owed: Callable[[str, str], Awaitable[set[str]]],
        now: Callable[[], float],
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not isinstance(payloads, PayloadStore | str | None):
            raise InvalidArgument(
                f"payloads is {payloads!r:.60}: use the URL of a payload store, or a PayloadStore"
            )
        self._store = payloads if isinstance(payloads, PayloadStore) else None
        self._own = self._store is None  # to close
        self._url = payloads if isinstance(payloads, str) else None
        self._named = payloads is not None  # by the application: whatever the cluster says
        self._pinned = ""  # whatever the cluster says, where it is the cluster's own
        self._token, self._tls = token, tls  # for workers who keep bodies,
        self._http: dict[str, None] = {}  # and where they do, as long as no store has been told
        self._greeting = greeting  # waits for a connection if there is none
        self._owed = owed  # which names of a topic are needed still, before a name or all
        self._cluster_time = now
        self._beside = False  # the store is the very server that has the messages
        self._tended: dict[str, float] = {}  # topic -> when, by the monotonic clock
        self._period = _TEND
        self._greetings = 0  # how often a worker has said where the store is
        self._pending: dict[str, list[str]] = {}
        self._deleting: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    @property
    def kind(self) -> str:
        """Which store it is, as workers are told: they delete from their own, whoever named it."""
        return "own" if self._named and not is_http(self._url or "") else "advertised"

    def pin(self, url: str) -> None:
        """Know the cluster's store without being told: workers tell others to come to themselves."""
        self._pinned = url

    @property
    def pinned(self) -> bool:
        """Whether this is the store of a worker, who reads what strangers have stored."""
        return bool(self._pinned)

    @property
    def where(self) -> str:
        """What to call the store in messages."""
        return public(self._url) if self._url else type(self._store).__name__

    def greeted(self, info: InfoReply) -> None:
        """A worker says where the store is: after a restart it may be elsewhere."""
        self._greetings += 1
        self._beside = info.payloads_beside
        url = self._pinned or info.payloads or None
        if not self._named and self._store is not None and url != self._url:
            _log.warning("bodies are stored in %s from now on", public(url or "") or "no store")
            self._tasks.start(self._store.close())  # who waits for it goes on with the new one
            self._store = None
        self._learn(info)

    def _learn(self, info: InfoReply) -> None:
        """A store of workers is where they are."""
        if info.http:
            self._http[info.http] = None
        if (learn := getattr(self._store, "learn", None)) is not None:
            for address in self._http:
                learn(address)
            self._http.clear()

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]], durability: str = "memory") -> None:
        """Store bodies under their names, for messages that are to be published with a durability."""
        while True:
            if not self._named:  # while no worker answers, somebody else may be at the store's address
                await self._greeting()
            store = self._store or await self._open()
            try:
                await store.put(topic, bodies)
            except Overloaded:
                self._tend_soon(topic, store, _TEND_FULL)  # what is left over makes room
                raise
            # On the server of the messages what is written first is on disk first.
            if durability == "fsync" and (self._named or not self._beside):
                await store.sync(topic, [name for name, _ in bodies])
            if self._named or store is self._store:
                self._tend_soon(topic, store)
                return

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies; None for one that is not there."""
        return await self._at_home(topic, names, self._get, inline_body)

    async def get_up_to(
        self, topic: str, names: Sequence[str], sizes: Sequence[int]
    ) -> list[bytes | bool | None]:
        """Read bodies of up to so many bytes; True in place of a longer one, None for one not there."""
        store = self._store or await self._open()
        found: dict[int, bytes | bool | None] = {}
        for home, places in by_home(topic, names).items():
            own = [home_of(topic, names[at])[1] for at in places]
            answers = await store.get_up_to(home, own, [sizes[at] for at in places])
            found.update(zip(places, answers, strict=True))
        return [found[at] for at in range(len(names))]

    async def _get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        if len(names) <= _AT_ONCE:
            return await self._ask(topic, names, lambda store, some: store.get(topic, some))
        found: list[bytes | None] = []
        for start in range(0, len(names), _AT_ONCE):
            found += await self._get(topic, names[start : start + _AT_ONCE])
        return found

    async def get_some(self, topic: str, names: Sequence[str], room: int) -> list[bytes | bool | None]:
        """Read the first of these bodies, as far as there is room; True in place of one that is large."""
        store = self._store or await self._open()
        return await store.get_some(topic, names, room)

    async def write(
        self, topic: str, name: str, parts: AsyncIterator[bytes], durability: str | None = None
    ) -> int:
        """Store a body that comes in parts; returns its length."""
        store = self._store or await self._open()
        self._tend_soon(topic, store)
        size = await store.write(topic, name, parts)
        if durability == "fsync" and (self._named or not self._beside):
            await store.sync(topic, [name])
        return size

    async def read(self, topic: str, name: str) -> AsyncIterator[bytes] | None:
        """Return the parts of a body, None if it is not there."""
        store = self._store or await self._open()
        return await store.read(topic, name)

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return when bodies are on disk."""
        await (self._store or await self._open()).sync(topic, names)

    async def drop(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies, now."""
        await (self._store or await self._open()).delete(topic, names)

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return which bodies exist."""
        return await self._at_home(topic, names, self._has, lambda name: inline_body(name) is not None)

    async def _has(self, topic: str, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            found += await self._ask(topic, some, lambda store, some: store.has(topic, some))
        return found

    async def _at_home(
        self,
        topic: str,
        names: Sequence[str],
        ask: Callable[[str, Sequence[str]], Awaitable[list[T]]],
        look: Callable[[str], T],
    ) -> list[T]:
        """Ask for bodies where they are stored: those of dead letters are in other topics.

        At those that are inline `look` is enough, unless the broker has withheld one: then Forbidden.
        """
        if not any(name[:1] in ("@", INLINE) for name in names):
            return await ask(topic, names)
        if WITHHELD in names:
            raise Forbidden(
                f"a body of topic {topic!r} is inline, and withheld from who may not consume: "
                f"the token needs consume:{topic}"
            )
        found = {at: look(name) for at, name in enumerate(names) if name[:1] == INLINE}
        for home, all_places in by_home(topic, names).items():
            if not (places := [at for at in all_places if at not in found]):
                continue
            answers = await ask(home, [home_of(topic, names[at])[1] for at in places])
            found.update(zip(places, answers, strict=True))
        return [found[at] for at in range(len(names))]

    async def _ask(
        self,
        topic: str,
        names: Sequence[str],
        ask: Callable[[PayloadStore, Sequence[str]], Awaitable[list[T]]],
    ) -> list[T]:
        while True:
            greetings = self._greetings
            try:
                store = self._store or await self._open()
                found = await ask(store, names)
                self._tend_soon(topic, store)
                if (None not in found and False not in found) or not await self._greeted_since(greetings):
                    return found
            except BrokerError as error:
                if not error.retriable or not await self._greeted_since(greetings):
                    raise

    async def _greeted_since(self, greetings: int) -> bool:
        """Return whether a worker has greeted since, once one answers: the store may be another now."""
        if self._named:
            return False
        with suppress(BrokerError):  # what has gone wrong before says more
            await self._greeting()
        return self._greetings != greetings

    def _tend_soon(self, topic: str, store: PayloadStore, period: float = _TEND) -> None:
        """Have the store look after a topic's bodies now and then; where it is the workers', they do so."""
        now = monotonic()
        url = self._url or ""
        theirs = (not self._named and is_redis(url)) or is_http(url)
        if not theirs and now - self._tended.get(topic, float("-inf")) >= min(period, self._period):
            self._tended[topic] = now
            self._tasks.start(self._tend(topic, store))

    async def _tend(self, topic: str, store: PayloadStore) -> None:
        try:
            await store.tend(topic, partial(self._owed, topic), self._cluster_time())
        except Exception as error:  # a store of the user's own may raise anything
            _log.warning("old bodies of topic %s are kept for now: %s", topic, error)

    def delete_later(self, topic: str, names: Sequence[str], *, doubtful: bool = False) -> None:
        """Delete bodies in the background; a lifetime takes what that misses.

        It is `doubtful` when the store may have yet to carry out what stores them.
        """
        names = [name for name in names if name[:1] != "@"]  # others may need those: workers know
        if names:
            self._pending.setdefault(topic, []).extend(names)
            if doubtful:
                self._tasks.start(self._delete_again(topic, names))
            if self._deleting is None:
                self._deleting = self._tasks.start(self._delete())

    async def _delete_again(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies once more, some time after the store has answered."""
        if self._deleting is not None:
            await asyncio.wait({self._deleting})
        await asyncio.sleep(_DOUBT)
        self.delete_later(topic, names)

    def delete(self, topic: str, names: Sequence[str], done: Callable[[], None]) -> None:
        """Delete bodies because a worker says so, who is told; else it asks another client."""
        self._tasks.start(self._delete_for(topic, names, done))

    async def _delete_for(self, topic: str, names: Sequence[str], done: Callable[[], None]) -> None:
        try:
            store = self._store or await self._open()
            for home, places in by_home(topic, names).items():
                await store.delete(home, [home_of(topic, names[at])[1] for at in places])
            done()
        except Exception as error:
            _log.warning(
                "could not delete bodies of %r (%d), another client will be asked to: %s",
                topic,
                len(names),
                error,
            )

    @property
    def pending_deletes(self) -> int:
        """How many bodies wait to be deleted."""
        return sum(map(len, self._pending.values()))

    async def finish(self) -> None:
        """Wait until what is to be deleted is."""
        await self._tasks.finish()

    async def close(self) -> None:
        """Stop deleting, and close the store if it is ours."""
        await self._tasks.cancel()
        for topic, names in self._pending.items():
            _warn(topic, names, "the client was closed")
        if self._own and self._store is not None:
            await self._store.close()

    async def _open(self) -> PayloadStore:
        info = await self._greeting()
        if self._store is None:
            if not self._named:
                self._url = self._pinned or info.payloads or None
            if self._url is None:
                raise InvalidArgument(
                    "the cluster advertises no payload store: pass payloads='redis://…' (or file:///…, "
                    "s3://…) to the client, or publish without a body"
                )
            url = self._url
            await in_thread(import_store, url)  # not in those of asyncio, which gevent makes greenlets of
            if self._store is None:  # nobody else has opened it meanwhile
                lifetime = info.payload_lifetime_ms / 1000 or _LIFETIME
                self._period = min(_TEND, lifetime / 8)
                self._store = open_store(url, lifetime=lifetime, token=self._token, tls=self._tls)
                self._learn(info)
        return self._store

    async def _delete(self) -> None:
        attempt = 0
        try:
            while self._pending:
                topic, names = self._pending.popitem()
                some = names[:_AT_ONCE]
                if len(names) > _AT_ONCE:
                    self._pending[topic] = names[_AT_ONCE:]
                try:
                    store = self._store or await self._open()
                    await store.delete(topic, some)
                    attempt = 0
                except Exception as error:
                    if (
                        isinstance(error, BrokerError)
                        and error.retriable
                        and self.pending_deletes < _MAX_PENDING
                    ):
                        self._pending.setdefault(topic, []).extend(some)
                        await asyncio.sleep(backoff(attempt))
                        attempt += 1
                    else:
                        _warn(topic, some, error)
        finally:
            self._deleting = None


def _warn(topic: str, names: Sequence[str], reason: object) -> None:
    _log.warning(
        "could not delete bodies of %r (%d), which remain until their lifetime ends: %s",
        topic,
        len(names),
        reason,
    )
