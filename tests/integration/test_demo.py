"""`keylane demo` shows what the broker does, checks what it shows, and leaves nothing behind."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from keylane import Client
from tests.support.commands import DEADLINE, KEYLANE, keylane, plain_signals
from tests.support.running import RunningBroker


@pytest.mark.slow
def test_the_tour_shows_everything_and_exits() -> None:
    """The command behind `make demo`."""
    done = keylane("demo", "--once")
    for words in (
        "shared: consumers split the work",
        "key_shared: each key is a lane",
        "bert is refused",
        "she left in good order",
        "it is here again: retry count 1",
        "anna's ack comes too late",
        "kill -9",
        "duplicate=True",
        "the keyspace checker finds 0 problems",
    ):
        assert words in done.stdout, done.stdout


@pytest.mark.slow
def test_after_the_tour_the_broker_serves_until_a_signal(tmp_path: Path) -> None:
    """What it says to try works; then no process is left, and the data is where it should be."""
    command = [KEYLANE, "demo", "--data-dir", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=plain_signals) as process:
        assert process.stdout is not None
        server = ""
        for line in process.stdout:
            if "keylane publish orders" in line:
                server = line.split()[-1]
            if "redis-cli" in line:
                break
        with Client(server) as client:
            assert client.describe_topic("orders").partitions == 4
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, errors
    _, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert alive == []
    assert (tmp_path / "server.log").exists()


@pytest.mark.slow
def test_on_somebody_elses_broker_it_leaves_no_topic(broker: RunningBroker) -> None:
    """And says as one JSON document what it did."""
    done = keylane("demo", "--once", "--json", "--server", broker.url)
    document = json.loads(done.stdout)
    assert (document["ok"], document["server"], len(document["steps"])) == (True, broker.url, 9)
    with Client(broker.url) as client:
        assert not any(name.startswith("demo-") for name in client.topics())
