"""`keylane doctor`: check that everything works, and say what to do if not."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import keylane
from keylane import ClusterInfo, ksuid
from keylane.commandline.output import CommandError, UsageError, progress_bar
from keylane.commandline.words import count_of
from keylane.errors import BrokerError, Forbidden, TopicNotFound, Unauthorized, Unavailable
from keylane_broker.commandline.cluster_view import partition_warnings
from keylane_broker.commandline.command import BrokerRun, before_another_look, command
from keylane_broker.commandline.partitions import all_partitions

if TYPE_CHECKING:  # slow to import
    from keylane_broker.engine.engine import Engine

__all__ = ["add_doctor"]

TRIPS = 5
REPORT = (
    "follow the advice given there; if there is none, keep a copy of the data and report this bug in Keylane"
)
ANSWER_SECONDS = 10.0  # whoever asks a doctor wants to know now
TAKE_OVER_SECONDS = 7.0  # more than the default partition lease
MOST_DRIFT = 1.0  # seconds


class Finding(NamedTuple):
    """The outcome of one check; `advice` says what to do when it is not ok."""

    check: str
    ok: bool
    detail: str
    advice: str = ""
    warns: bool = False  # nothing is broken, and yet there is something to know


def add_doctor(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "doctor")(doctor)


async def doctor(
    run: BrokerRun,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also check the broker's Redis, at this URL.", show_default=False),
    ] = None,
) -> None:
    """Check the broker, its clock, the payload store and, with --redis, its Redis."""
    from rich.text import Text

    findings = await _check_broker(run)
    if redis:
        findings += await _check_redis(redis)
    marks = {True: Text("ok", "green"), False: Text("WRONG", "bold red")}
    note = Text("note", "yellow")
    rows = [(note if item.warns else marks[item.ok], item.check, item.detail) for item in findings]
    run.table([item._asdict() for item in findings], ["", "check", "found"], rows)
    wrong = [item for item in findings if not item.ok]
    for item in findings:
        if not run.json and (item.warns or not item.ok):
            run.out.print(f"\n{item.check}: {item.advice}", markup=False, soft_wrap=True)
    if wrong:
        raise CommandError(f"{len(wrong)} of {len(findings)} checks found something wrong")


async def _check_broker(run: BrokerRun) -> list[Finding]:
    from importlib.metadata import version

    try:
        async with run.client(timeout=ANSWER_SECONDS) as client:
            info = await client.info()
            return [
                Finding("broker", True, f"{run.server}, version {info.version}"),
                Finding("client", True, f"version {version('keylane')}, protocol {info.protocol}"),
                *await _check_cluster(client),
                *await _check_times(client),
                await _check_payloads(client, info),
            ]
    except Unavailable as error:
        advice = "this should pass by itself; if it does not, see the workers' logs"
        if "MISCONF" in str(error):
            advice = (
                "free space on the disk of Redis, or see its log: workers and clients go on by themselves"
            )
        elif "Redis" in str(error):
            advice = "bring Redis back: workers recover by themselves, and restarting them does not help"
        return [Finding("broker", False, str(error), advice)]
    except (Unauthorized, Forbidden) as error:
        advice = (
            "set KEYLANE_TOKEN to a token that may look at all: keylane token create NAME --allow 'observe:*'"
        )
        return [Finding("broker", False, str(error), advice)]
    except BrokerError as error:
        advice = "start a broker with `keylane serve`, or give the URL of another with --server"
        return [Finding("broker", False, str(error), advice)]


async def _check_cluster(client: "keylane.AsyncClient") -> list[Finding]:
    """Who serves, and whether every partition is served; after a loss that takes a partition lease."""
    end = time.monotonic() + TAKE_OVER_SECONDS
    while True:
        report = await client.cluster()
        topics = await all_partitions(client)
        warnings = partition_warnings(topics)
        if not warnings or time.monotonic() > end:
            break
        await before_another_look()
    workers = ", ".join(
        f"{worker.id} at {worker.address}{'' if worker.state == 'serving' else f' ({worker.state})'}"
        for worker in report.workers
    )
    partitions = count_of(sum(map(len, topics.values())), "partition")
    served = f"{partitions} of {count_of(len(topics), 'topic')}, all served"
    able = any(worker.state == "serving" for worker in report.workers)
    advice = "see `keylane cluster` and the workers' logs"
    return [
        Finding("workers", able, workers, "no worker accepts partitions: start one, or undo a drain"),
        Finding("partitions", not warnings, "; ".join(warnings) or served, advice),
    ]


async def _check_times(client: "keylane.AsyncClient") -> list[Finding]:
    """The fastest of several round trips, and how far the two clocks are apart."""
    best, drift = float("inf"), 0.0
    for _ in range(TRIPS):
        began = time.perf_counter()
        info = await client.info()
        trip = time.perf_counter() - began
        if trip < best:
            best, drift = trip, (info.time - datetime.now(UTC)).total_seconds() + trip / 2
    clocks = f"the cluster's is {abs(drift):.3f} s {'ahead' if drift > 0 else 'behind'}"
    return [
        Finding("round trip", True, f"{best * 1000:.2f} ms"),
        Finding(
            "clocks",
            abs(drift) <= MOST_DRIFT,
            clocks,
            "absolute times (deliver_at, deadlines) are off by this much: let NTP set the clocks of this "
            "machine and of Redis",
        ),
    ]


async def _check_payloads(client: "keylane.AsyncClient", info: ClusterInfo) -> Finding:
    """Store, read and delete a body."""
    [name], body = ksuid.take(1), b"keylane doctor"
    advice = (
        "clients cannot store or read bodies there: make the address reachable from this machine, or set "
        "the broker's --payloads to one that is"
    )
    try:
        store = client._bodies
        await store.put("doctor", [(name, body)])
        [found] = await store.get("doctor", [name])
        await store.drop("doctor", [name])
    except (BrokerError, OSError) as error:
        return Finding("payloads", False, str(error), advice)
    return Finding("payloads", found == body, info.payloads, advice)


async def _check_redis(url: str) -> list[Finding]:
    from keylane.payloads import public
    from keylane.redis.urls import check_url
    from keylane_broker.engine.engine import Engine
    from keylane_broker.inspect.fitness import advice_on, examine

    try:
        check_url(url)
    except ValueError as error:
        raise UsageError(f"--redis is {public(url)!r}: {error}") from None
    engine = Engine.connect(url)
    try:
        server = [
            Finding(found.check, found.grade == "fit", found.detail, found.advice)
            for found in await examine(engine.store)
        ]
        usable = all(found.ok for found in server if found.check == "redis")
        return [*server, *(await _check_state(engine) if usable else [])]
    except BrokerError as error:
        return [Finding("redis", False, str(error), advice_on(error))]
    finally:
        await engine.close()


async def _check_state(engine: "Engine") -> list[Finding]:
    """What the broker keeps there."""
    return [await _check_leads(engine), await _check_workers(engine), *await _check_topics(engine)]


async def _check_workers(engine: "Engine") -> Finding:
    """Whether what workers tell each other fits together."""
    from keylane_broker.inspect.cluster_checker import check_cluster

    problems = await check_cluster(engine)
    detail = "; ".join(problems) or "what they tell each other is consistent"
    return Finding("worker records", not problems, detail, REPORT)


async def _check_leads(engine: "Engine") -> Finding:
    """Partitions whose time is ahead of that of Redis: its clock has gone back."""
    from keylane_broker.store.keys import partition_keys

    ahead: dict[str, int] = {}
    for topic in sorted(await engine.topics()):
        try:
            count = (await engine.describe_topic(topic)).partitions
        except TopicNotFound:
            continue  # gone since
        commands = [("HGET", partition_keys(topic, number).meta, "lead") for number in range(count)]
        for number, lead in enumerate(await engine.store.read_all(commands)):
            if int(lead or 0) > MOST_DRIFT * 1000:
                ahead[f"partition {number} of {topic}"] = int(lead)
    if not ahead:
        return Finding("partition clocks", True, "none is notably ahead of Redis")
    place, lead_ms = max(ahead.items(), key=lambda item: item[1])
    return Finding(
        "partition clocks",
        True,
        f"{len(ahead)} ahead of Redis, most {place}, by {lead_ms / 1000:.1f} s",
        "the clock of Redis has gone back, or a replica with a clock behind took over. Leases, sessions, "
        "delays and dedupe windows last as long as they should; published_at, and what seek to a time "
        "compares it with, are ahead by this much, and stay so while the topic lives. Let NTP slew the "
        "clocks of all Redis servers",
        warns=True,
    )


async def _check_topics(engine: "Engine") -> list[Finding]:
    """Every invariant of every topic."""
    from keylane_broker.inspect.snapshot import scan
    from keylane_broker.inspect.topic_checker import check_leftovers, check_topic

    scanned = await scan(engine.store)
    left = await check_leftovers(engine, scanned)
    findings = [
        Finding("topics", not left, "; ".join(left) or "none is half-created", "follow the advice beside it")
    ]
    with progress_bar() as progress:
        for topic in progress.track(sorted(await engine.topics()), description="checking topics"):
            try:
                problems = await check_topic(engine, topic, scanned)
            except TopicNotFound:
                continue  # gone since
            detail = "; ".join(problems) or "every invariant holds"
            findings.append(Finding(f"topic {topic}", not problems, detail, REPORT))
    return findings
