"""Applications at work in processes of their own, and the record of what they saw."""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from keylane.types import Mode
from keylane.types import Published as Answer
from keylane.wire import partition_of
from tests.chaos import application as seen
from tests.chaos.application import Order, Seen, decode
from tests.chaos.recorder import Name, Recorder
from tests.support.running import ROOT

MODES: dict[str, Mode] = {
    "shared": "shared",
    "keyed": "key_shared",
    "exclusive": "exclusive",
    "failover": "failover",
}
LINE = 16 * 1024 * 1024  # bytes of the longest line
KEYS = 3  # of each partition


class Asked(NamedTuple):
    """A publish that was answered: when it was sent, when the answer came, and under which ledger."""

    at: float
    answered: float
    partition: int
    ledger: int


class Crowd:
    """Producers and consumers of a topic; a context manager that ends those that are left."""

    def __init__(self, url: str, topic: str, partitions: int, seed: int) -> None:
        self.events: list[tuple[str, Seen]] = []  # who saw what
        self.failures: list[str] = []
        self.answered = 0
        self._silent: set[int] = set()  # partitions that have answered nothing since somebody began to wait
        self._url, self._topic, self._seed = url, topic, seed
        self._keys = keys_of(partitions)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()
        self._open: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._readers.values())
        for process in self._processes.values():
            await process.wait()

    async def start_producers(self, count: int, rate: float) -> None:
        """Start so many, which together publish `rate` messages a second."""
        names = [f"p{number}" for number in range(count)]
        await self._start(
            [
                Order(self._url, self._topic, name, self._seed, rate=rate / count, keys=self._keys)
                for name in names
            ]
        )

    async def start_consumers(self, count: int) -> None:
        """Start so many, each with a consumer of every subscription; only the first in exclusive."""
        orders = []
        for number in range(count):
            modes = {name: mode for name, mode in MODES.items() if mode != "exclusive" or number == 0}
            names = sorted(modes, key=lambda name: (number + list(MODES).index(name)) % len(MODES))
            ordered = {name: modes[name] for name in names}
            orders.append(Order(self._url, self._topic, f"c{number}", self._seed, subscriptions=ordered))
        await self._start(orders)

    async def _start(self, orders: Sequence[Order]) -> None:
        for order in orders:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.application",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
                limit=LINE,
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._processes[order.name] = process
            self._readers[order.name] = asyncio.create_task(self._read(order.name, process))
        while not self._open >= {order.name for order in orders} and not self.failures:
            await self.progress()

    async def _read(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            for event in decode(line):
                if isinstance(event, seen.Open):
                    self._open.add(name)
                elif isinstance(event, seen.Failed):
                    self.failures.append(event.text)
                else:
                    if isinstance(event, seen.Published):
                        self.answered += 1
                        self._silent.discard(event.partition)
                    self.events.append((name, event))
            self._moved.set()
        if await process.wait():
            self.failures.append(f"{name} ended with {process.returncode}")
        self._moved.set()

    async def progress(self) -> None:
        """Wait until somebody has seen something."""
        self._moved.clear()
        await self._moved.wait()

    async def until_each_partition_answers(self) -> None:
        """Wait until a publish has been answered from now on by each partition."""
        self._silent = set(range(len(self._keys)))
        while self._silent and not self.failures:
            await self.progress()

    async def stop(self, kind: str) -> None:
        """Let producers ("p") or consumers ("c") finish what they have begun, and end."""
        for name, process in self._processes.items():
            if name.startswith(kind) and process.stdin is not None:
                process.stdin.close()
        await asyncio.gather(*(reader for name, reader in self._readers.items() if name.startswith(kind)))

    # Afterwards

    def replay(self, disturbances: Sequence[float]) -> Recorder:
        """Tell a recorder everything, in the order in which it happened.

        `disturbances` are the instants around which an answer may have been lost.
        """
        record = Recorder(MODES)
        waiting = sorted(disturbances, reverse=True)
        asked: dict[tuple[str, str], list[int]] = defaultdict(list)  # disturbances before each ack was sent
        events = sorted(self.events, key=lambda item: item[1].at)
        began = events[0][1].at if events else 0.0
        for who, event in events:
            while waiting and waiting[-1] <= event.at:
                waiting.pop()
                record.crashes += 1
            record.now = event.at - began
            _tell(record, who, event, asked)
        record.problems += self.failures
        return record

    def publishes(self) -> list[Asked]:
        """All that were answered, by the time of the answer."""
        sent: dict[tuple[str, int], float] = {}
        found = []
        for who, event in self.events:
            if isinstance(event, seen.Publishing):
                sent[who, event.number] = event.at
            elif isinstance(event, seen.Published):
                at = sent[who, event.number]
                found.append(Asked(at, event.at, event.partition, event.ledger))
        return sorted(found, key=lambda publish: publish.answered)


def _tell(record: Recorder, who: str, event: Seen, asked: dict[tuple[str, str], list[int]]) -> None:
    match event:
        case seen.Publishing(number=number, key=key):
            record.publishing((who, number), key)
        case seen.Published(number=number):
            answer = Answer(event.partition, event.uid, event.ledger, event.entry, duplicate=event.duplicate)
            record.published((who, number), answer)
        case seen.Delivered():
            record.delivered(event.subscription, event.consumer, event)
        case seen.Nacking():
            record.nacking(event.subscription, _name(event.name))
        case seen.Acking():
            record.acking(event.subscription, [_name(name) for name in event.names])
            for name in event.names:
                asked[f"{who} {event.subscription}", name].append(record.crashes)
        case seen.Acked():
            for name, outcome in zip(event.names, event.outcomes, strict=True):
                since = asked[f"{who} {event.subscription}", name].pop(0)
                record.acked(event.subscription, _name(name), outcome, since)


def _name(text: str) -> Name:
    producer, _, number = text.partition(" ")
    return producer, int(number)


def keys_of(partitions: int) -> list[list[str]]:
    """Some keys of each partition, and none: such messages have no lane in key_shared."""
    keys: list[list[str]] = [[] for _ in range(partitions)]
    number = 0
    while any(len(some) < KEYS for some in keys):
        key = f"key-{number}"
        if len(some := keys[partition_of(key, partitions)]) < KEYS:
            some.append(key)
        number += 1
    return [[*some, ""] for some in keys]
