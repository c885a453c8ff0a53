"""kill -9 of driver and executors in the middle of a batch: the sink holds every message exactly once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from keylane import Client, OutgoingMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.java import HOME
from tests.support.running import ROOT, RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_java"), pytest.mark.timeout(600)]

MESSAGES = 12_000
DEADLINE = 200.0  # seconds, for what starts Java on a machine that has other things to do


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    """A broker of the test's own: it is paused."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
def topic(client: Client, topic: str) -> str:
    """A topic with messages that only the query is owed."""
    client.create_topic(topic, partitions=3)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(str(at), key=f"key-{at % 97}") for at in range(MESSAGES)])
    return topic


class Driver:
    """The process of a streaming job."""

    def __init__(
        self, broker: RunningBroker, topic: str, folder: Path, moment: str, *, master: str, home: Path
    ) -> None:
        self._home = home
        self.marker = folder / "marker"
        self.marker.unlink(missing_ok=True)
        self._log = folder / f"log-{moment}"
        module = "tests.pipeline.crash_driver"
        command = [sys.executable, "-m", module, master, broker.url, topic, str(folder), moment]
        roots = (ROOT, *(ROOT / name for name in ("client", "broker", "pipeline")))
        path = os.pathsep.join(map(str, roots))
        environment = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": path}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until it is so, while the job runs."""
        end = time.monotonic() + DEADLINE
        while not what():
            assert self._process.poll() is None, f"the job has ended:\n{self._log.read_text()}"
            assert time.monotonic() < end, f"it does not come to be:\n{self._log.read_text()}"
            time.sleep(0.05)

    def kill(self, *, only_java: bool = False) -> None:
        """kill -9: the job and all that it has started, or its Java alone, which takes the others along."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # a Python worker that has just ended by itself
                if not only_java or process.name() == "java":
                    process.kill()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=30)

    def finish(self) -> None:
        """Wait for its end."""
        assert self._process.wait(DEADLINE) == 0, self._log.read_text()

    def executors(self) -> list[Path]:
        """The folders of its executors, if they are processes."""
        return list(self._home.glob("work/app-*/*"))

    def close(self) -> None:
        """Leave nothing behind."""
        if self._process.poll() is None:
            self.kill()


@pytest.fixture
def start(broker: RunningBroker, topic: str, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts jobs, each of which goes on where the one before was killed."""
    drivers: list[Driver] = []

    def start(moment: str, master: str = "local[2]", home: Path = HOME) -> Driver:
        drivers.append(Driver(broker, topic, tmp_path, moment, master=master, home=home))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


async def check_all_is_well(broker: RunningBroker, client: Client, topic: str, folder: Path) -> None:
    """Every message is in the sink exactly once, and nothing is left in the broker."""
    rows = pyarrow.parquet.read_table(folder / "rows", columns=["value", "message_id"]).to_pydict()
    assert sorted(int(value) for value in rows["value"]) == list(range(MESSAGES))
    assert len(set(rows["message_id"])) == MESSAGES
    assert client.describe_subscription(topic, "spark").backlog == 0
    assert client.describe_topic(topic).messages == 0
    engine = Engine.connect(broker.redis_url)
    try:
        assert await check_topic(engine, topic) == []
    finally:
        await engine.close()


async def test_a_driver_killed_at_any_moment_of_a_batch_loses_nothing_and_repeats_nothing(
    broker: RunningBroker, client: Client, topic: str, start: Callable[..., Driver], tmp_path: Path
) -> None:
    drained = MESSAGES
    for moment in ("planned", "reading", "written"):
        driver = start(moment)
        driver.wait_for(driver.marker.exists)
        # What stands in a batch that is not done is not drained.
        backlog = client.describe_subscription(topic, "spark").backlog
        assert 0 < backlog <= drained
        drained = backlog
        driver.kill(only_java=moment == "reading")
    # Between the commit of the checkpoint and that of the broker, which does not answer then.
    driver = start("committed")
    driver.wait_for(driver.marker.exists)
    commits = tmp_path / "checkpoint" / "commits"
    done = len(list(commits.glob("[0-9]*")))
    broker.pause()
    (tmp_path / "go").touch()
    driver.wait_for(lambda: len(list(commits.glob("[0-9]*"))) > done)
    driver.kill()
    broker.resume()
    start("never").finish()
    await check_all_is_well(broker, client, topic, tmp_path)


async def test_an_executor_killed_in_a_batch_is_replaced_and_the_query_goes_on(
    broker: RunningBroker,
    client: Client,
    topic: str,
    start: Callable[..., Driver],
    tmp_path: Path,
    spark_home: Path,
) -> None:
    driver = start("reading", master="local-cluster[2,1,1024]", home=spark_home)
    driver.wait_for(driver.marker.exists)
    os.kill(int(driver.marker.read_text()), signal.SIGKILL)
    driver.finish()
    assert driver.executors(), "they have run in a folder of the test"
    await check_all_is_well(broker, client, topic, tmp_path)
