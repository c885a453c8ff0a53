"""`keylane demo` shows what the broker does, checks what it shows, and leaves nothing behind."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from keylane import Client
from keylane_broker import logs
from keylane_broker.commandline import demo
from keylane_broker.config import Settings
from keylane_broker.ports import free_port
from keylane_broker.supervise import supervisor
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
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            text=True,
            preexec_fn=plain_signals,
            env={**os.environ, "KEYLANE_PORT": str(taken.getsockname()[1])},
        ) as process,
    ):
        assert process.stdout is not None
        typed: list[str] = []
        for line in process.stdout:
            if "keylane publish orders" in line:
                typed = shlex.split(line)
                break
        subprocess.run(typed, check=True, capture_output=True, timeout=DEADLINE)
        with Client(typed[-1]) as client:
            assert client.describe_topic("orders").partitions == 4
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, errors
    _, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert alive == []
    assert (tmp_path / "server.log").exists()


async def test_the_demo_serves_where_the_examples_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the port of the settings, which is 9999 by default, unless something else listens there."""
    ports = []

    @contextlib.asynccontextmanager
    async def supervise(settings: Settings) -> AsyncIterator[None]:
        ports.append(settings.port)
        yield

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr(logs, "start_logging", lambda level: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setenv("KEYLANE_PORT", str(number))
        async with demo._broker(None, port=None):
            pass
    free = free_port()
    monkeypatch.setenv("KEYLANE_PORT", str(free))
    async with demo._broker(None, port=None):
        pass
    assert ports == [0, free]


@pytest.mark.slow
def test_on_somebody_elses_broker_it_leaves_no_topic(broker: RunningBroker) -> None:
    """And says as one JSON document what it did."""
    done = keylane("demo", "--once", "--json", "--server", broker.url)
    document = json.loads(done.stdout)
    assert (document["ok"], document["server"], len(document["steps"])) == (True, broker.url, 9)
    with Client(broker.url) as client:
        assert not any(name.startswith("demo-") for name in client.topics())
