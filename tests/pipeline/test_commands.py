"""`keylane pipeline` as people and scripts run it."""

import inspect
import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keylane import Client, OutgoingMessage
from keylane.commandline.typed import parse_time
from keylane_broker.commandline.main import app
from keylane_spark.commandline import command as commandline
from keylane_spark.commandline.archive import WORDING
from keylane_spark.commandline.command import Job
from keylane_spark.commandline.main import pipeline
from keylane_spark.commandline.spark_errors import explain_spark_error
from keylane_spark.connection import Connection
from keylane_spark.errors import DataLoss
from keylane_spark.files import LocalFiles
from keylane_spark.source.commits import moved_away
from keylane_spark.source.data_loss import report
from tests.pipeline.archives import ids_in
from tests.pipeline.drivers import BIN, QUICK_JAVA, ROOT, Driver, keylane
from tests.support.running import RunningBroker

NO_JAVA = {"JAVA_HOME": "/nowhere", "PATH": str(BIN)}


def run(*words: str, **environment: str) -> Any:
    return CliRunner(env=environment).invoke(app, ["pipeline", *words])


def test_a_time_without_a_zone_is_utc_wherever_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "America/Lima")
        time.tzset()
        found = parse_time("2026-11-16T13:00")
    time.tzset()
    assert found == datetime(2026, 11, 16, 13, tzinfo=UTC)
    assert parse_time("2026-11-16T13:00+02:00") == datetime(2026, 11, 16, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    "words", [["archive"], ["replay"], ["archive", "--to", "x"], ["replay", "x", "y", "--rate", "0"]]
)
def test_what_cannot_be_meant_is_status_2(words: list[str]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["archive", "--to", "x"], "give the topics to archive, or --compact"),
        (["archive", "orders", "--to", "x", "--compact"], "without topics"),
        (
            ["archive", "orders", "--to", "x", "--conf", "nonsense"],
            "--conf 'nonsense' is not of the form NAME=VALUE",
        ),
        (["replay", "x", "orders", "--rate", "-1"], "--rate -1 is not more than 0"),
        (
            ["audit", "orders", "--since", "noon"],
            "--since 'noon' is not a time; write it as 2026-12-31T23:59:00Z",
        ),
        (
            ["replay", "x", "orders", "--since", "noon"],
            "--since 'noon' is not a time; write it as 2026-12-31T23:59:00Z",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_before_spark_starts(words: list[str], complaint: str) -> None:
    for more in ([], ["--json"]):
        done = run(*words, *more)
        assert (done.exit_code, done.stdout) == (2, "")
        assert complaint in done.stderr
        if more:
            assert json.loads(done.stderr)["error"]["code"] == "usage"


def test_without_java_the_command_that_brings_it_is_told() -> None:
    done = run("archive", "--compact", "--to", "x", **NO_JAVA)
    assert done.exit_code == 1
    assert "error: no Java found" in done.stderr
    assert "apt-get install openjdk-17" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["archive", "nowhere", "--to", "x"],
        ["replay", "x", "nowhere"],
        ["audit", "nowhere", "--out", "x"],
        ["skew", "nowhere", "--out", "x"],
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_topic_and_a_broker_that_is_not_there_are_said_without_java(
    words: list[str], broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words, "--server", broker.url, **NO_JAVA)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "error: no topic 'nowhere'" in done.stderr
    monkeypatch.setattr(Connection, "sync", lambda of: Client(of.server, timeout=0.2))
    done = run(*words, "--server", "keylane://127.0.0.1:1", "--json", **NO_JAVA)
    assert (done.exit_code, done.stdout) == (1, "")
    assert json.loads(done.stderr.splitlines()[-1])["error"]["code"] == "connection_failed"


def test_a_folder_in_use_is_said_without_java(
    broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    (tmp_path / "diary.txt").touch()
    words = ["audit", topic, "--server", broker.url, "--master", "local[2]"]
    done = run(*words, "--out", str(tmp_path), **NO_JAVA)
    assert done.exit_code == 1
    assert "is not empty, and not from an earlier audit" in done.stderr
    done = run(*words, "--out", str(tmp_path / "out"), "--archive", str(tmp_path), **NO_JAVA)
    assert f"no archive of {topic!r}" in done.stderr
    done = run(*words, "--out", str(tmp_path / "out"), **NO_JAVA)
    assert "error: no Java found" in done.stderr, "who names a master wants Spark"


@pytest.mark.parametrize(
    "words", [["archive", "orders", "--to"], ["audit", "orders", "--out"], ["skew", "orders", "--out"]]
)
def test_a_folder_that_is_a_file_is_refused_without_java(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()
    for path in (tmp_path / "diary.txt", tmp_path / "diary.txt" / "inside"):
        done = run(*words, str(path), **NO_JAVA)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"error: {path} cannot be a folder: {tmp_path / 'diary.txt'} is a file\n"


def test_an_error_of_the_file_system_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()
    assert Job().execute(lambda: LocalFiles().entries(f"{tmp_path}/diary.txt")) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/diary.txt: Not a directory\n"


def test_a_payload_store_that_is_none_is_said_in_one_line(
    broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic, journal=True)
    client.create_subscription(topic, "s")
    client.publish(topic, b"tea")
    words = ["audit", topic, "--server", broker.url, "--out", str(tmp_path / "out")]
    done = run(*words, "--payloads", "nonsense", **NO_JAVA)
    assert done.exit_code == 1
    assert "error: 'nonsense' is not the URL of a payload store" in done.stderr
    assert "or use --no-bodies" in done.stderr


def test_a_small_job_on_this_machine_gets_a_java_that_starts_quickly() -> None:
    assert commandline.for_rows(None, "local[2]") == commandline.for_rows(10**7, None) == {}
    quick = commandline.for_rows(400_000, None)
    assert quick["spark.sql.shuffle.partitions"] == "8"
    assert "TieredStopAtLevel=1" in quick["spark.driver.extraJavaOptions"]
    assert commandline.for_rows(200, "yarn") == {"spark.sql.shuffle.partitions": "2"}


def test_without_spark_the_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commandline, "find_spec", lambda name: None)
    done = run("archive", "--compact", "--to", "x", "--json")
    assert done.exit_code == 1
    assert (
        json.loads(done.stderr)["error"]["message"]
        == "the pipeline needs Spark: pip install 'keylane[spark]'"
    )


def test_the_command_line_does_not_load_spark() -> None:
    heavy = "('pyspark', 'pyarrow', 'numpy')"
    code = (
        f"import sys, keylane_broker.commandline.main; sys.exit(any(name in sys.modules for name in {heavy}))"
    )
    subprocess.run([BIN / "python", "-c", code], cwd=ROOT, check=True, timeout=200)


@pytest.mark.parametrize("job", ["archive", "replay", "audit", "skew"])
def test_every_job_is_a_command_that_takes_a_token_and_a_payload_store(job: str) -> None:
    names = {command.name: command for command in pipeline.registered_commands}
    callback = names[job].callback
    assert callback is not None
    options = inspect.signature(callback).parameters
    assert {"server", "token", "payloads", "json", "master", "conf"} <= options.keys()


def test_a_token_is_for_all_that_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_TOKEN", "old")
    assert Job(token="new", payloads="redis://store").payloads == "redis://store"
    assert Connection.parse({}).token == "new"


def test_what_a_task_says_is_found_in_what_spark_says() -> None:
    text = """[PYTHON_EXCEPTION] Traceback (most recent call last):
  File "x.py", line 1, in <module>
keylane.errors.Overloaded: the payload store has reached its maxmemory: OOM
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner"""
    error = explain_spark_error(text)
    assert (error.code, error.retriable) == ("overloaded", True)
    assert str(error) == "the payload store has reached its maxmemory: OOM"
    error = explain_spark_error("\n[TABLE_NOT_FOUND] there is none\n\tat x")
    assert (error.code, str(error), error.retriable) == ("spark", "[TABLE_NOT_FOUND] there is none", False)
    assert explain_spark_error("").code == "spark"
    lost = "…\nkeylane_spark.errors.DataLoss: 3 messages are gone\n\tat org.apache.spark…"
    assert str(explain_spark_error(lost)) == "3 messages are gone"


def test_an_archive_names_its_flags_where_the_data_source_names_options() -> None:
    advice = "Start the query with a new checkpointLocation to read what there is now"
    with pytest.raises(DataLoss) as lost:
        report(True, "3 messages are gone", advice)
    error = explain_spark_error(f"…\nkeylane_spark.errors.DataLoss: {lost.value}\n", WORDING)
    assert str(error) == (
        "3 messages are gone. Use another --to folder to archive what there is now. To continue with what "
        "is left, use --skip-lost"
    )
    error = explain_spark_error(
        f"…\nkeylane.errors.SubscriptionMoved: {moved_away('it was moved')}\n", WORDING
    )
    assert str(error).endswith("drained: use another --to folder")


def test_errors_that_are_not_ours_are_not_hidden() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Job().execute(fail)


@pytest.fixture
def orders(client: Client, topic: str) -> Counter[str]:
    """The ids of what is in the test's topic."""
    client.create_topic(topic, partitions=4)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    messages = [OutgoingMessage(b"%d" % n, key=f"k{n % 9}") for n in range(2_000)]
    return Counter(str(published.id) for published in client.publish_many(topic, messages))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_archive_that_is_killed_holds_each_message_once_at_every_moment(
    broker: RunningBroker, topic: str, orders: Counter[str], tmp_path: Path, new_java: None
) -> None:
    archive, state = tmp_path / "archive", tmp_path / "archive.keylane"
    words = ("archive", topic, "--to", str(archive), "--server", broker.url)
    small = ("--batch-rows", "450", "--compact-every", "2", "--json")

    def moving() -> bool:
        """A batch is noted down, and not all of its files are where they belong."""
        return any(state.glob("*/notes/*.json")) and any(state.glob("*/staging/*/topic=*/date=*/*.parquet"))

    def switching() -> bool:
        return any(state.glob("compaction/*.json"))

    def reading() -> Counter[str]:
        return ids_in(archive)

    for moment in (moving, switching):
        with Driver(*keylane(*words, *small)) as driver:
            driver.until(moment, or_ends=True)
            driver.kill()
        assert max(reading().values(), default=1) == 1, moment.__name__
    with Driver(*keylane(*words, *small)) as driver:
        result = json.loads(driver.finish())
    assert (result["topics"], result["path"]) == ([topic], str(archive))
    assert reading() == orders
    assert not list(state.rglob("*.parquet"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_runs_by_spark_submit(
    broker: RunningBroker, topic: str, orders: Counter[str], tmp_path: Path, new_java: None
) -> None:
    submit: list[str | Path] = [BIN / "spark-submit", "--master", "local[2]", *QUICK_JAVA]
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    with Driver(  # of Spark as it is installed
        "env",
        "--unset=SPARK_HOME",
        f"PATH={path}",
        *submit,
        ROOT / "pipeline" / "keylane_spark" / "jobs" / "archive.py",
        topic,
        "--to",
        tmp_path / "archive",
        "--server",
        broker.url,
        "--json",
    ) as driver:
        result = json.loads(driver.finish().splitlines()[-1])  # Spark puts both outputs of Python into one
    assert (result["rows"], result["batches"]) == (2_000, 1)
    assert ids_in(tmp_path / "archive") == orders
