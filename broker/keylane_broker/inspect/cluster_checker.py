"""Proves that what workers tell each other through Redis fits together, and fits the topics.

    problems = await check_cluster(engine)      # [] when all is well

As in topic_checker a problem counts only if it is still there when looked at again: workers come and go,
and the controller follows a topic that was made or deleted a moment later.
"""

import asyncio
from collections.abc import Iterator

import msgspec

from keylane.errors import InvalidName
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.snapshot import ClusterSnapshot, take_cluster_snapshot
from keylane_broker.store.keys import CONTROLLER, OWNERS, WORKERS, check_name, worker_key

_LOOKS = 3
_PAUSE = 0.2  # seconds between two looks, time for the controller to follow
_STATES = ("serving", "draining", "stopping")


async def check_cluster(engine: Engine) -> list[str]:
    """Return all that cannot be right outside of partitions, as sentences; empty if all is well."""
    lasting: list[str] | None = None
    for look in range(_LOOKS):
        if look:
            await asyncio.sleep(_PAUSE)
        found = list(cluster_problems(await take_cluster_snapshot(engine.store)))
        lasting = found if lasting is None else [text for text in lasting if text in found]
        if not lasting:
            break
    return lasting or []


def cluster_problems(cluster: ClusterSnapshot) -> Iterator[str]:
    """Yield what breaks a rule in one snapshot."""
    for worker in cluster.heartbeats:
        if not _is_name(worker):
            yield f"{WORKERS} lists {worker!r}, which is no worker's name"
    for worker, (fields, left_ms) in cluster.workers.items():
        for problem in _worker_problems(fields, left_ms, worker in cluster.heartbeats):
            yield f"{worker_key(worker)} {problem}"
    if cluster.controller_ms == -1:
        yield f"{CONTROLLER} is {cluster.controller!r} forever"
    if cluster.controller and not _is_name(cluster.controller):
        yield f"{CONTROLLER} is {cluster.controller!r}, which is no worker's name"
    yield from _owner_problems(cluster)


def _worker_problems(fields: dict[str, str], left_ms: int, listed: bool) -> Iterator[str]:
    if not listed:
        yield f"is not in {WORKERS}"
    if left_ms == -1:
        yield "never ends"
    if fields.get("state") not in _STATES:
        yield f"has the state {fields.get('state')!r}"
    try:
        msgspec.json.decode(fields.get("load", "{}"), type=dict[str, tuple[float, float]])
        float(fields.get("messages", "0")) + float(fields.get("script_ms", "0"))
        int(fields.get("started_ms", "0"))
    except (ValueError, msgspec.DecodeError) as error:
        yield f"cannot be read: {error}"


def _owner_problems(cluster: ClusterSnapshot) -> Iterator[str]:
    for name, value in cluster.owners.items():
        if name == "#":
            if not value.isdecimal():
                yield f"{OWNERS} has the version {value!r}"
            continue
        for worker in value.split():
            if worker != "-" and not _is_name(worker):
                yield f"{OWNERS} names {worker!r} for {name!r}, which is no worker's name"
        topic = cluster.topics.get(name)
        if not topic:
            yield f"{OWNERS} names {name!r}, which is no topic"
        elif topic.get("state") == "ready" and len(value.split()) != int(topic["partitions"]):
            yield (
                f"{OWNERS} names {len(value.split())} owners for {name!r}, "
                f"which has {topic['partitions']} partitions"
            )
    if cluster.owners and "#" not in cluster.owners:
        yield f"{OWNERS} has no version"


def _is_name(text: str) -> bool:
    try:
        check_name("worker", text)
    except InvalidName:
        return False
    return True
