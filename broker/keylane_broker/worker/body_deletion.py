"""Deletes bodies whose messages have left the log, as the scripts have written down who they are.

A record goes when its bodies are gone, so nothing that crashes leaves any behind: whoever serves the
partition next works off what is there. Where the cluster's payload store is a Redis the worker deletes; from
any other store, and from those that applications bring along, clients do, each record one of them.
"""

import asyncio
import logging
from collections.abc import Collection
from itertools import islice
from random import choice
from typing import NamedTuple, Protocol

from keylane import wire
from keylane.errors import BrokerError
from keylane.payloads import PayloadStore, is_redis, open_store
from keylane_broker.engine.bodies import (
    BodyRecord,
    add_orphans,
    count_body_records,
    list_orphans,
    read_body_records,
    remove_body_records,
)
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import Place
from keylane_broker.logs import FailureLog
from keylane_broker.store.store import Store
from keylane_broker.worker.background import Background

log = logging.getLogger("keylane.broker")

LOOK = 30.0  # seconds between looks at all partitions: for what a worker left that was not their owner
_GATHER = 0.1  # seconds in which records gather
_PLACES = 100  # partitions in one round
_RECORDS = 100  # of a partition in one round
_PATIENCE = 10.0  # seconds that a client has to delete what it was asked to
_PAUSE = 1.0  # seconds until the next attempt while the store is away

OWN, ADVERTISED = "own", "advertised"  # payload stores that a client can delete from, as INFO says it


class DeletingClient(Protocol):
    """A connection, as far as bodies are concerned."""

    store: str  # the payload store that it can delete from

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def may_use(self, topic: str) -> bool:
        """Whether the client may have to do with a topic."""

    def uses(self, topic: str) -> bool:
        """Whether the client has to do with a topic."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame."""


class _Handed(NamedTuple):
    """A record that a client is at work on."""

    connection: DeletingClient
    place: Place
    record: str
    timer: asyncio.TimerHandle


class BodyDeletion:
    """What one worker does about bodies that nobody needs any more, in any partition."""

    def __init__(
        self,
        keys: Store,
        url: str,
        lifetime: float,
        *,
        background: Background,
        partitions: Collection[Place],
        connections: Collection[DeletingClient],
    ) -> None:
        self._keys = keys
        self._background = background
        self._partitions = partitions  # that the worker serves
        self._connections = connections
        self.store: PayloadStore | None = open_store(url, lifetime=lifetime) if is_redis(url) else None
        self._dirty: dict[Place, None] = {}  # where there may be records
        self._left: set[Place] = set()  # of topics that are gone
        self._wanted = asyncio.Event()
        self._handed: dict[int, _Handed] = {}  # by sequence
        self._handed_to: dict[DeletingClient, set[int]] = {}  # and by who is at work on them
        self._out: dict[tuple[Place, str], int] = {}  # record -> sequence
        self._failed: dict[tuple[Place, str], DeletingClient] = {}  # who has not deleted it in time
        self._sequence = 0
        self._answered = asyncio.Event()

    # What others tell

    def wake(self, topic: str, partition: int) -> None:
        """There may be records in a partition."""
        self._dirty[topic, partition] = None
        self._wanted.set()

    async def look(self) -> None:
        """There may be some anywhere."""
        for topic, partition in self._partitions:
            self.wake(topic, partition)
        self._left = set(await list_orphans(self._keys))
        self.joined()

    def joined(self) -> None:
        """A client has come that can delete: it may do what was left when a topic went."""
        for place in self._left:
            self.wake(*place)

    def recorded(self, connection: DeletingClient, place: Place, record: str, names: list[str]) -> None:
        """A client has settled messages: their bodies are to be deleted by it, or by us."""
        mine = ADVERTISED if self.store is None else OWN
        if connection.store == mine and names and not any(name[:1] == "@" for name in names):
            self._hand(connection, place, record, names)
        else:
            self.wake(*place)

    def answered(self, connection: DeletingClient, sequence: int) -> None:
        """A client has deleted what it was asked to."""
        handed = self._handed.get(sequence)
        if handed is not None and handed.connection is connection:
            self._take_back(sequence)
            self._background.start(self._remove, handed.place, [handed.record])

    def gone(self, connection: DeletingClient) -> None:
        """A client has gone: others are to do what it has not."""
        for sequence in list(self._handed_to.get(connection, ())):
            self.wake(*self._take_back(sequence).place)

    # Working records off

    async def run(self) -> None:
        """Work off what there is, for as long as the worker runs."""
        failures = FailureLog(log, "deleting bodies")
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_GATHER)
            self._wanted.clear()
            places = list(islice(self._dirty, _PLACES))
            for place in places:
                del self._dirty[place]
            try:
                self._dirty.update(dict.fromkeys(await self._work_off(places)))
                failures.recovered()
            except BrokerError as error:
                self._dirty.update(dict.fromkeys(places))
                failures.failed(error)
                await asyncio.sleep(_PAUSE)
            except Exception:
                log.exception("a bug while deleting bodies; the worker goes on")
            if self._dirty:
                self._wanted.set()

    async def finish(self, topic: str, partitions: int) -> None:
        """Work off all of a topic; what no client deletes in time is left for those who come later."""
        end = asyncio.get_running_loop().time() + _PATIENCE
        places = [(topic, number) for number in range(partitions)]
        while places:
            self._answered.clear()
            more = []
            for first in range(0, len(places), _PLACES):
                more += await self._work_off(places[first : first + _PLACES])
            counts = await count_body_records(self._keys, places)
            places = [place for place, count in zip(places, counts, strict=True) if count]
            if places and not more:
                if {place for place, _ in self._out}.isdisjoint(places):
                    break  # nobody is at it
                try:
                    async with asyncio.timeout_at(end):
                        await self._answered.wait()
                except TimeoutError:
                    break
        if places:
            log.warning("bodies of %r stay for now: no connected client can delete them", topic)
            await add_orphans(self._keys, places)
            self._left.update(places)
            self.joined()

    async def close(self) -> None:
        """Do what is left to do now; the rest is for whoever comes next."""
        if self.store is not None:
            try:
                async with asyncio.timeout(_PAUSE):
                    await self._work_off(list(islice(self._dirty, _PLACES)))
            except (BrokerError, TimeoutError) as error:
                log.info("bodies are left to be deleted: %s", error)
            await self.store.close()

    async def _work_off(self, places: list[Place]) -> list[Place]:
        """Delete what records name, the oldest first; return where there may be more."""
        doomed: dict[str, list[str]] = {}
        done: dict[Place, list[str]] = {}
        able: dict[tuple[Place, bool], list[DeletingClient]] = {}  # to delete of a partition, as far as known
        more = []
        for place, records in zip(places, await read_body_records(self._keys, places, _RECORDS), strict=True):
            for record in records:
                if any(name[:1] == "@" for name in record.names):  # of dead letters: where are they?
                    at_home = await let_go(self._keys, place[0], record.names, self.wake)
                else:
                    at_home = {place[0]: record.names}
                if self.store is not None:
                    for topic, names in at_home.items():
                        doomed.setdefault(topic, []).extend(names)
                if any(at_home.values()) and (record.own or self.store is None):
                    if (place, record.own) not in able:
                        able[place, record.own] = self._able(place, own=record.own)
                    clients = able[place, record.own]
                    self._offer(place, record._replace(names=_names_in(place[0], at_home)), clients)
                else:
                    done.setdefault(place, []).append(record.id)
            if len(records) == _RECORDS and place in done:
                more.append(place)
        if self.store is not None:
            for topic, names in doomed.items():
                await self.store.delete(topic, names)
        for place, gone in done.items():
            await self._remove(place, gone)
        return more

    async def _remove(self, place: Place, records: list[str]) -> None:
        await remove_body_records(self._keys, place, records)
        self._answered.set()

    # Having clients do it

    def _able(self, place: Place, *, own: bool) -> list[DeletingClient]:
        """Return the clients that can delete what records of a partition name."""
        store = OWN if own else ADVERTISED
        return [
            connection
            for connection in self._connections
            if connection.alive
            and connection.store == store
            and connection.may_use(place[0])
            and (connection.uses(place[0]) or not own or place in self._left)
        ]

    def _offer(self, place: Place, record: BodyRecord, able: list[DeletingClient]) -> None:
        """Ask one of the clients that are able; without one it is tried again at the next look."""
        if (place, record.id) in self._out:
            return
        while able and not (client := choice(able)).alive:
            able.remove(client)
        if len(able) > 1 and client is self._failed.get((place, record.id)):
            client = choice([one for one in able if one is not client])
        if able:
            self._hand(client, place, record.id, record.names)

    def _hand(self, connection: DeletingClient, place: Place, record: str, names: list[str]) -> None:
        self._sequence += 1
        timer = asyncio.get_running_loop().call_later(_PATIENCE, self._late, self._sequence)
        self._handed[self._sequence] = _Handed(connection, place, record, timer)
        self._handed_to.setdefault(connection, set()).add(self._sequence)
        self._out[place, record] = self._sequence
        connection.send(wire.DeleteBodies(place[0]), self._sequence, wire.pack(names))

    def _late(self, sequence: int) -> None:
        handed = self._take_back(sequence)
        self._failed[handed.place, handed.record] = handed.connection
        self.wake(*handed.place)

    def _take_back(self, sequence: int) -> _Handed:
        handed = self._handed.pop(sequence)
        handed.timer.cancel()
        its = self._handed_to[handed.connection]
        its.discard(sequence)
        if not its:
            del self._handed_to[handed.connection]
        del self._out[handed.place, handed.record]
        self._failed.pop((handed.place, handed.record), None)
        return handed


def _names_in(topic: str, at_home: dict[str, list[str]]) -> list[str]:
    """Return names of bodies, by the topics in which they are, as messages of one topic name them."""
    return [
        name if home == topic and name[:1] != "@" else f"@{home}/{'@' * (name[:1] == '@')}{name}"
        for home, names in at_home.items()
        for name in names
    ]
