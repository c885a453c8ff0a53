"""The audit of real topics: under traffic, after a theft, with consumers that nack."""

import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from redis import Redis
from typer.testing import CliRunner

from keylane import AsyncClient, Client, OutgoingMessage
from keylane.types import Mode
from keylane_broker.commandline.main import app
from keylane_broker.store.store import Store
from keylane_spark.auditing.audit import AuditOptions, run
from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.in_memory import engine as in_memory
from keylane_spark.connection import Connection
from keylane_spark.errors import JobError
from tests.pipeline.audits import audited, no_spark
from tests.pipeline.inbox import problems_of
from tests.pipeline.journals import rows_of
from tests.support.running import RunningBroker

PARTITIONS = 3
NO_JAVA = {"JAVA_HOME": "/nowhere", "KEYLANE_TOKEN": ""}
MODES: dict[str, Mode] = {"billing": "key_shared", "search": "shared"}


async def publish(client: AsyncClient, topic: str, count: int) -> list[str]:
    """So many messages with keys; answers their ids."""
    messages = [OutgoingMessage(b"tea", key=f"customer-{number % 50}") for number in range(count)]
    return [answer.id or "" for answer in await client.publish_many(topic, messages)]


async def consume(client: AsyncClient, topic: str, name: str) -> None:
    """Ack what comes until cancelled; every seventh is nacked the first time."""
    async with client.subscribe(topic, name, mode=MODES[name]) as consumer:
        async for batch in consumer.batches(max_messages=100, max_wait=0.1):
            messages = list(batch)
            back = {
                one.id for one in messages if one.retry_count == 0 and int(one.id.rpartition("-")[2]) % 7 == 0
            }
            await consumer.nack([one for one in messages if one.id in back], delay=0)
            await consumer.ack([one for one in messages if one.id not in back])


async def settle(
    url: str, topic: str, produce: Callable[[AsyncClient], Awaitable[None]] | None = None
) -> None:
    """Consume while something is produced, and on until nothing is left."""
    async with AsyncClient(url) as client, anyio.create_task_group() as group:
        for name in MODES:
            group.start_soon(consume, client, topic, name)
        if produce is not None:
            await produce(client)
        with anyio.fail_after(120):
            while True:
                left = [(await client.describe_subscription(topic, name)).backlog for name in MODES]
                if not any(left):
                    break
                await anyio.sleep(0.1)
        group.cancel_scope.cancel()


def make_topic(url: str, topic: str) -> None:
    """With a journal, and both subscriptions."""
    with Client(url) as client:
        client.create_topic(topic, partitions=PARTITIONS, journal=True)
        for name, mode in MODES.items():
            client.create_subscription(topic, name, mode=mode, backoff=0.01)


@pytest.mark.timeout(900)
def test_a_message_that_was_taken_out_of_the_log_is_named(
    spark: SparkSession, elsewhere: str, tmp_path: Path, topic: str
) -> None:
    """Everything else was acked; and the command ends with 1."""
    with RunningBroker() as broker:
        make_topic(broker.url, topic)

        async def begin() -> list[str]:
            async with AsyncClient(broker.url) as client:
                return await publish(client, topic, 300)

        stolen = anyio.run(begin)[123]
        # A worker that has just published has the message at hand; one that has not looks into the log.
        broker.kill_worker()
        broker.start_worker()
        partition, _, entry = stolen.partition(":")

        async def steal() -> None:
            store = Store.connect(broker.redis_url)
            assert await store.command("XDEL", f"kl:{{{topic}:{partition}}}:log", entry) == 1
            await store.close()

        anyio.run(steal)
        anyio.run(settle, broker.url, topic)
        found = audited(broker, topic, f"{elsewhere}/out", spark)  # which is tmp_path to us
        assert found.verdict == "incomplete"
        assert {(lost.message_id, lost.subscription) for lost in found.lost} == {
            (stolen, "billing"),
            (stolen, "search"),
        }
        assert {one.name: (one.settled, one.lost) for one in found.subscriptions} == {
            "billing": (299, 1),
            "search": (299, 1),
        }
        assert all(one.duplicates and one.transitions["nacked"] for one in found.subscriptions)
        # The snapshot that Spark has left says the same without Spark, and with no broker to ask.
        words = [
            "pipeline",
            "audit",
            topic,
            "--journal",
            str(tmp_path / "out"),
            "--out",
            str(tmp_path / "again"),
        ]
        done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 1, done.output
    again = msgspec.json.decode(done.stdout, type=Audit)
    assert msgspec.structs.replace(again, activity=[]) == msgspec.structs.replace(found, activity=[])
    assert stolen in (tmp_path / "again" / "audit.html").read_text()


@pytest.mark.slow
def test_live_traffic_is_no_cause_for_alarm(broker: RunningBroker, tmp_path: Path, topic: str) -> None:
    """Audits while messages and subscriptions come and go find nothing lost; at rest all is settled."""
    published: list[str] = []
    over = threading.Event()
    make_topic(broker.url, topic)

    async def produce(client: AsyncClient) -> None:
        number = 0
        while not over.is_set():
            number += 1
            published.extend(await publish(client, topic, 20))
            if number % 20 == 1:  # one comes late, from the oldest message on, and goes again
                await client.create_subscription(topic, f"guest-{number}", start="earliest")
            elif number % 20 == 15:
                await client.delete_subscription(topic, f"guest-{number - 14}")
            await anyio.sleep(0.1)

    traffic = threading.Thread(target=anyio.run, args=[settle, broker.url, topic, produce])
    traffic.start()
    try:
        audits = [audited(broker, topic, tmp_path / "live") for _ in range(5)]
    finally:
        over.set()
        traffic.join(120)
    assert not traffic.is_alive()
    assert [(found.verdict, found.lost) for found in audits] == [("complete", [])] * 5
    assert audits[-1].messages > 0
    with Client(broker.url) as client:
        for name in client.describe_topic(topic).subscriptions:
            if name.startswith("guest"):
                client.delete_subscription(topic, name)
        client.publish_many(topic, [OutgoingMessage("waits")] * 5)
        backlog = {name: client.describe_subscription(topic, name).backlog for name in MODES}
    found = audited(broker, topic, tmp_path / "at-rest")
    assert found.verdict == "complete"
    assert {one.name: one.backlog for one in found.subscriptions if one.name in MODES} == backlog
    assert set(backlog.values()) == {5}, "the audit and the command line have one word for it"
    settled = {one.name: one.settled for one in found.subscriptions if not one.name.startswith("guest")}
    assert settled == dict.fromkeys(MODES, len(published))
    assert problems_of(broker, topic) == []


@pytest.mark.slow
def test_a_body_that_is_gone_is_found_without_spark_and_java(
    broker: RunningBroker, tmp_path: Path, topic: str
) -> None:
    """Its message is lost for who has not settled it; a body that went with its message is no loss."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=2, journal=True)
        for name in ("billing", "search"):
            client.create_subscription(topic, name)
        sent = client.publish_many(topic, [OutgoingMessage(b"%d" % n, key=f"k{n}") for n in range(20)])
        client.publish(topic, key="without a body")
        with client.subscribe(topic, "billing") as consumer:
            for _ in range(21):
                message = consumer.receive(timeout=30)
                assert message is not None
                message.ack()
        gone = sent[7]
        at, _, entry = str(gone.id).partition(":")
        page = client.read(topic, int(at), int(entry.partition("-")[2]), int(entry.partition("-")[2]) + 1)
        assert client.has_bodies(topic, [page.flat[1]]) == [True]
        with Redis.from_url(broker.redis_url) as redis:
            for key in redis.scan_iter(match=f"kl:bodies:{topic}:*"):
                redis.hdel(key, page.flat[1])
        assert client.has_bodies(topic, [page.flat[1]]) == [False]

    words = ["pipeline", "audit", topic, "--server", broker.url, "--out", str(tmp_path / "out")]
    done = CliRunner(env=NO_JAVA).invoke(app, [*words, "--json"])
    assert done.exit_code == 1, done.output
    found = msgspec.json.decode(done.stdout, type=Audit)
    assert [(one.message_id, one.subscription, one.reason) for one in found.lost] == [
        (gone.id, "search", "no_body")
    ]
    assert {one.name: (one.settled, one.backlog) for one in found.subscriptions} == {
        "billing": (21, 0),
        "search": (0, 20),
    }
    assert found.bodies is not None
    assert (found.bodies.there, found.bodies.checked, found.bodies.missing) == (20, 20, 1)

    done = CliRunner(env=NO_JAVA).invoke(app, [*words, "--sample", "3", "--json"])
    found = msgspec.json.decode(done.stdout, type=Audit)
    assert found.bodies is not None
    assert found.bodies.checked < found.bodies.there == 20
    assert found.why[-1] == f"bodies of {found.bodies.checked} of 20 messages in the log checked"
    assert CliRunner().invoke(app, [*words, "--sample", "3", "--no-bodies"]).exit_code == 2
    done = CliRunner(env=NO_JAVA).invoke(app, [*words, "--no-bodies"])
    assert done.exit_code == 0, done.output
    assert f"{topic}: complete" in done.stdout
    assert "bodies not checked" in done.stdout


def test_what_turns_out_to_be_large_is_for_spark(
    broker: RunningBroker, client: Client, tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its size, that of its archive, or the ranges of its records, which nobody knows before."""
    client.create_topic(topic, partitions=1, journal=True)
    client.create_subscription(topic, "billing")
    client.publish_many(topic, [OutgoingMessage(b"x") for _ in range(30)])
    assert audited(broker, topic, tmp_path / "small").messages == 30
    with monkeypatch.context() as patch:
        patch.setattr(in_memory, "MOST_ROWS", 20)
        with pytest.raises(AssertionError, match="Spark was asked for"):
            audited(broker, topic, tmp_path / "large")
    archive = tmp_path / "archive" / f"topic={topic}"
    archive.mkdir(parents=True)
    pq.write_table(rows_of(f"0:1-{entry}" for entry in range(1, 31)), archive / "part.parquet")
    options = AuditOptions(
        topic=topic,
        out=str(tmp_path / "out"),
        connection=Connection(broker.url),
        archive=str(tmp_path / "archive"),
        small=50,
    )
    with pytest.raises(AssertionError, match="Spark was asked for"):
        run(options, no_spark)
    found, _ = run(msgspec.structs.replace(options, small=80), no_spark)
    assert found.archive is not None
    assert (found.archive.earlier, found.archive.committed) == (30, None)  # of ledger 1


def test_a_record_that_is_gone_is_no_proof(broker: RunningBroker, tmp_path: Path, topic: str) -> None:
    """The last one, or one in between: unproven, and nothing is lost."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1, journal=True)
        client.create_subscription(topic, "billing")
        client.publish_many(topic, [OutgoingMessage(b"x") for _ in range(3)])
        with client.subscribe(topic, "billing") as consumer:
            for _ in range(3):
                message = consumer.receive(timeout=30)
                assert message is not None
                message.ack()
    assert audited(broker, topic, tmp_path / "whole").verdict == "complete"
    journal = f"kl:{{{topic}:0}}:journal"
    with Redis.from_url(broker.redis_url, decode_responses=True) as redis:
        records = redis.xrange(journal)
        for what in ("acked", "published"):  # the last one first
            [*_, number] = [id for id, fields in records if fields["what"] == what]
            assert redis.xdel(journal, number) == 1
            found = audited(broker, topic, tmp_path / what)
            assert (found.verdict, found.lost) == ("unproven", []), what
            assert "of the journal is gone" in found.why[0]


def test_an_idle_partition_is_proven_since_the_journal_was_switched_on(
    broker: RunningBroker, tmp_path: Path, topic: str
) -> None:
    """Where nothing has happened since, the journal says so."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=4)
        client.create_subscription(topic, "billing")
        client.publish_many(topic, [OutgoingMessage(b"x", key=f"k{n}") for n in range(40)])
        client.change_topic(topic, journal=True)
    found = audited(broker, topic, tmp_path / "all")
    assert (found.verdict, found.unproven) == ("unproven", 40)
    options = AuditOptions(
        topic=topic,
        out=str(tmp_path / "since"),
        connection=Connection(broker.url),
        since=datetime.now(UTC) + timedelta(seconds=1),
    )
    found = run(options, no_spark)[0]
    assert found.verdict == "complete"
    assert "no message was judged" in found.why[0]


def test_a_snapshot_of_another_topic_is_refused(broker: RunningBroker, tmp_path: Path, topic: str) -> None:
    make_topic(broker.url, topic)
    audited(broker, topic, tmp_path / "first")
    options = AuditOptions(
        topic="another",
        out=str(tmp_path / "second"),
        connection=Connection(broker.url),
        journal=str(tmp_path / "first"),
    )
    with pytest.raises(JobError, match=f"holds an audit of topic '{topic}', not of 'another'"):
        run(options, no_spark)
