"""Fixtures for tests with Spark: one session for each process, and a plain word where there is no Java."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from keylane import Client
from keylane_broker.supervise.embedded_server import Server
from keylane_spark.session import JavaMissing, require_java, session
from tests.pipeline.power import PowerCut
from tests.pipeline.tables import Table
from tests.support.java import HOME, INSTALLED, SETTINGS, make_archive, make_home
from tests.support.running import RunningBroker

OPTIONS = {
    **SETTINGS,
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.daemon.module": "tests.support.spark_daemon",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Java are slow, and get time."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        asks_for_spark = {"spark", "hadoop"} & set(map(str, parameters))  # when it runs
        if asks_for_spark or "java" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def java() -> None:
    """For tests that start Java: skipped where there is none, and failed where everything has to run."""
    try:
        require_java()
    except JavaMissing as missing:
        if os.environ.get("CI"):
            pytest.fail(f"tests with Spark cannot run: {missing}", pytrace=False)
        pytest.skip(f"tests with Spark are left out: {missing}")
    os.environ["SPARK_HOME"] = str(make_home())  # for all processes that tests start


@pytest.fixture(scope="session")
def new_java(java: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that start a Java of their own, which is to start fast."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all test processes share
    (folder / "java").mkdir(exist_ok=True)
    make_archive(folder / "java")


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that all tests of this process share; a task is tried four times."""
    folder = tmp_path_factory.mktemp("spark")
    options = {**OPTIONS, "spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "tables")}
    spark = session("tests", "local[2,4]", **options)
    yield spark
    spark.stop()


@pytest.fixture
def spark_home(java: None, tmp_path: Path) -> Iterator[Path]:
    """A Spark for jobs on `local-cluster`, which write into SPARK_HOME whatever SPARK_WORKER_DIR says."""
    home = tmp_path / "spark"
    home.mkdir()
    for entry in HOME.iterdir():
        (home / entry.name).symlink_to(entry)
    before = sorted(INSTALLED.glob("work/*"))
    yield home
    assert sorted(INSTALLED.glob("work/*")) == before, "a job has written into the installed Spark"
    assert not (HOME / "work").exists(), "a job has written into what tests share"


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[Client]:
    """A client of the broker that all tests share."""
    with Client(broker.url) as client:
        yield client


@pytest.fixture
def read(spark: SparkSession, broker: RunningBroker, topic: str) -> Callable[..., DataFrame]:
    """Reads the test's topic with the options given."""

    def read(**options: str) -> DataFrame:
        return (
            spark.read.format("keylane")
            .options(**{"server": broker.url, "subscribe": topic, **options})
            .load()
        )

    return read


@pytest.fixture
def stream(spark: SparkSession, broker: RunningBroker, topic: str) -> Callable[..., DataFrame]:
    """A streaming frame of the test's topic, read by subscription `spark` unless told otherwise."""

    def stream(**options: str) -> DataFrame:
        given = {"server": broker.url, "subscription": "spark", **options}
        if not options.keys() & {"subscribePattern", "assign"}:
            given.setdefault("subscribe", topic)
        return spark.readStream.format("keylane").options(**given).load()

    return stream


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> Table:
    """Where a streaming query of the test writes to."""
    return Table(spark, tmp_path / uuid.uuid4().hex[:8])


@pytest.fixture
def other_table(spark: SparkSession, tmp_path: Path) -> Table:
    """Where another query of the test writes to."""
    return Table(spark, tmp_path / uuid.uuid4().hex[:8])


@pytest.fixture
def elsewhere(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """The test's folder as one of another file system, which knows it by another path: for Hadoop alone."""
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    name = f"cluster-{uuid.uuid4().hex[:8]}"
    mount = f"fs.viewfs.mounttable.{name}.link./data"
    conf.set(mount, f"file://{tmp_path}")
    yield f"viewfs://{name}/data"
    conf.unset(mount)


@pytest.fixture
def power(tmp_path: Path) -> Iterator[PowerCut]:
    """A broker of the test's own."""
    server = Server(data_dir=tmp_path / "server", appendfsync="always")
    with server, RunningBroker(server) as broker:
        yield PowerCut(tmp_path, server, broker)
