"""A Spark cluster of several processes, started by the commands of compose.yaml: only the master differs."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from keylane import Client, OutgoingMessage
from keylane_broker.ports import free_port
from tests.support.java import HOME, QUICK
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # five Java machines

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_SECONDS = 120.0
MESSAGES = 1_000

JOB = """
import sys
import time
from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id

server, topic, out = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
frame = spark.read.format("keylane").option("server", server).option("subscribe", topic).load()
frame.select("key", "value", "offset", "partition").write.parquet(out)
end, executors = time.monotonic() + 100, 0
while executors < 2 and time.monotonic() < end:  # on a busy machine the job may be done by the first
    executors = len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1
    time.sleep(0.1)
print("executors", executors)
"""


@pytest.fixture
def services() -> dict[str, Any]:
    """The services of compose.yaml by name."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    return found


@pytest.fixture
def master(services: dict[str, Any], tmp_path: Path) -> Iterator[str]:
    """The address of a master with as many workers as compose.yaml has."""
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    changed = {"spark": "127.0.0.1", "7077": str(port), "8081": "0", "spark://spark:7077": address}
    workers = services["spark-worker"]["deploy"]["replicas"]
    log = tmp_path / "log"
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        for name in ["spark"] + ["spark-worker"] * workers:
            service = services[name]
            words = [changed.get(word, word) for word in service["command"]]
            words += ["--webui-port", "0"] * (name == "spark-worker")
            command = [BIN / service["entrypoint"][0], *service["entrypoint"][1:], *words]
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=output, stderr=output, env=environment(tmp_path)
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        end = time.monotonic() + START_SECONDS
        while log.read_text().count("Registering worker") < workers:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)  # nobody tells when a worker has come
        yield address


def environment(folder: Path) -> dict[str, str]:
    """As little as there is in a container."""
    return {
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(HOME),
        "JAVA_TOOL_OPTIONS": QUICK,  # they live for seconds
    }


def test_a_job_for_a_standalone_cluster_is_the_same_job(
    master: str, broker: RunningBroker, topic: str, tmp_path: Path, new_java: None
) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=4)
        client.create_subscription(topic, "keeper", mode="cursor")
        client.publish_many(topic, [OutgoingMessage(str(n), f"key-{n % 50}") for n in range(MESSAGES)])
    job = tmp_path / "job.py"
    job.write_text(JOB)
    out = tmp_path / "out"
    done = subprocess.run(
        [BIN / "spark-submit", "--master", master, job, broker.url, topic, out],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert sorted(int(row["value"]) for row in rows) == list(range(MESSAGES))
    assert all(row["key"] == f"key-{int(row['value']) % 50}" for row in rows)
    assert "executors 2" in done.stdout
