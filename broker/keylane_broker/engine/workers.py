"""The workers of a cluster as Redis knows them: who is alive, who is the controller, who is to own what."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from keylane.errors import InvalidArgument, Unavailable, did_you_mean
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.codec import to_flat
from keylane_broker.engine.values import Owners, WorkerReport
from keylane_broker.limits import MAX_MS, MAX_TIME_MS
from keylane_broker.store.keys import (
    CONTROLLER,
    EVENTS,
    OWNERS,
    WORKERS,
    check_name,
    worker_key,
)

_VERSION = "#"  # no topic has this name
_PATIENCE = 1.0  # seconds for a node of a Redis Cluster before one goes on without it
_NOBODY = "-"  # nor has a worker this one


class WorkerOperations(EngineBase):
    """What workers tell each other through Redis."""

    # Workers

    async def enlist(self, report: WorkerReport, ttl_ms: int) -> None:
        """Send a worker's first heartbeat: what an earlier process of that name left is dropped."""
        await self._report(report, ttl_ms, "1")

    async def heartbeat(self, report: WorkerReport, ttl_ms: int) -> None:
        """Report that a worker is alive, and how it is doing; an operator's drain stays."""
        await self._report(report, ttl_ms, "")

    async def _report(self, report: WorkerReport, ttl_ms: int, from_scratch: str) -> None:
        check_name("worker", report.id)
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        fields = {
            "address": report.address,
            "release": report.release,
            "state": report.state,
            "started_ms": str(report.started_ms),
            "messages": str(report.messages),
            "script_ms": str(report.script_ms),
            "load": msgspec.json.encode(report.load).decode(),
            "http": report.http,
        }
        await self.store.try_all(
            [
                ("cluster/heartbeat", [WORKERS], [report.id]),
                ("cluster/report", [worker_key(report.id)], [ttl_ms, from_scratch, *to_flat(fields)]),
            ],
            _PATIENCE,
        )

    async def depart(self, worker: str) -> None:
        """Forget a worker that stops, also as the controller."""
        key = worker_key(check_name("worker", worker))
        await self.store.run("cluster/resign", [CONTROLLER], worker)
        await self.store.read_all([("ZREM", WORKERS, worker), ("DEL", key)])

    async def workers(self) -> list[WorkerReport]:
        """Return all known workers, sorted by id; one of which only the name is left is "lost"."""
        _, now_ms, found = await self.store.run("cluster/list", [WORKERS])
        heartbeats = {worker: int(float(at)) for worker, at in zip(found[::2], found[1::2], strict=True)}
        ids = sorted(heartbeats)
        stored = await asyncio.gather(*(self._fields_of(worker) for worker in ids))
        return [
            _report_of(worker, fields, heartbeats[worker], now_ms - heartbeats[worker])
            for worker, fields in zip(ids, stored, strict=True)
        ]

    async def _fields_of(self, worker: str) -> dict[str, str]:
        """Return what a worker says about itself, or said last if the node that has it is away."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                [self._said[worker]] = await self.store.all_fields([worker_key(worker)])
        return self._said.get(worker, {})

    async def dismiss(self, worker: str, heartbeat_ms: int) -> bool:
        """Forget a worker that has died; returns False if it was heard of since that heartbeat."""
        key = worker_key(check_name("worker", worker))
        check_int("heartbeat_ms", heartbeat_ms, 0, MAX_TIME_MS)
        answer = await self.store.run("cluster/dismiss", [WORKERS], worker, heartbeat_ms)
        if answer[0] != "OK":
            return False
        await self.store.read_all([("DEL", key)])
        return True

    async def drain(self, worker: str, draining: bool) -> None:
        """Take all partitions from a worker and give it no more, or let it take part again."""
        key = worker_key(check_name("worker", worker))
        answer = await self.store.run("cluster/drain", [key], "1" if draining else "")
        if answer[0] != "OK":
            known = [report.id for report in await self.workers() if report.state != "lost"]
            raise InvalidArgument(
                f"no worker {worker!r}{did_you_mean(worker, known)}; there are {', '.join(known) or 'none'}"
            )

    # The controller

    async def lead(self, worker: str, ttl_ms: int) -> tuple[str, int]:
        """Become the controller if nobody else is; returns who it is and for how many ms."""
        check_name("worker", worker)
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        _, holder, left_ms = await self.store.run("cluster/lead", [CONTROLLER], worker, ttl_ms)
        return holder, left_ms

    # Owners

    async def owners(self, known: Owners | None = None) -> Owners:
        """Return which worker is to own which partition; what is known is not read again."""
        if known is not None:
            [version] = await self.store.read_all([("HGET", OWNERS, _VERSION)])
            if int(version or 0) == known.version:
                return known
        stored = await self.store.fields(OWNERS)
        version = int(stored.pop(_VERSION, "0"))
        return Owners(
            version,
            {
                topic: [worker.removeprefix(_NOBODY) for worker in workers.split()]
                for topic, workers in stored.items()
            },
        )

    async def assign(self, version: int, changes: dict[str, list[str] | None]) -> bool:
        """Change the owners of some topics, None to drop one; returns False if `version` is outdated."""
        check_int("version", version, 0, MAX_MS)
        pairs = []
        for topic, workers in changes.items():
            for worker in filter(None, workers or ()):
                check_name("worker", worker)
            pairs += [check_name("topic", topic), " ".join(worker or _NOBODY for worker in workers or ())]
        answer = await self.store.run("cluster/assign", [OWNERS], version, *pairs)
        return bool(answer[0] == "OK")

    # Events

    async def announce(self, event: str) -> None:
        """Tell all workers that something has changed: a hint, which may get lost."""
        with suppress(Unavailable):
            await self.store.say(EVENTS, event)

    def listen(self, on_event: Callable[[str], None]) -> Coroutine[Any, Any, None]:
        """Listen to announcements until cancelled; "" says that some may have been missed."""
        return self.store.listen(EVENTS, on_event)


def _report_of(worker: str, fields: dict[str, str], heartbeat_ms: int, age_ms: int) -> WorkerReport:
    if "state" not in fields:
        return WorkerReport(worker, state="lost", heartbeat_ms=heartbeat_ms, age_ms=age_ms)
    draining = fields["state"] == "serving" and "draining" in fields
    return WorkerReport(
        worker,
        fields.get("address", ""),
        fields.get("release", ""),
        "draining" if draining else fields["state"],
        int(fields.get("started_ms", "0")),
        float(fields.get("messages", "0")),
        float(fields.get("script_ms", "0")),
        msgspec.json.decode(fields.get("load", "{}"), type=dict[str, tuple[float, float]]),
        fields.get("http", ""),
        heartbeat_ms,
        age_ms,
    )
