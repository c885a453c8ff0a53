"""`keylane serve` starts a broker, keeps it running, and leaves nothing behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keylane import AsyncClient, StaleReceipt
from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import Server, ask
from tests.support.commands import DEADLINE, KEYLANE, keylane, plain_signals

pytestmark = pytest.mark.slow  # each command is a process


class Serving:
    """A `keylane serve --json` in a process."""

    def __init__(self, *arguments: str) -> None:
        command = [KEYLANE, "serve", "--json", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, preexec_fn=plain_signals
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready: dict[str, Any] = json.loads(line)
        self.url = self.ready["address"]
        self.redis_port = int(self.ready["redis"].rpartition(":")[2].partition("/")[0])
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, how: signal.Signals) -> int:
        """End it with a signal and return its exit status."""
        self.descendants += psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(how)
        status = self.process.wait(DEADLINE)
        self.process.communicate()
        return status

    def left_behind(self) -> list[psutil.Process]:
        """Which of its children do not end."""
        _, alive = psutil.wait_procs(self.descendants, timeout=DEADLINE)
        return alive


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts brokers on free ports, with their data in one directory."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Serving:
            serving = Serving("--port", "0", "--data-dir", str(tmp_path / "data"), *arguments)
            stack.callback(_end_if_running, serving)
            return serving

        yield start


def _end_if_running(serving: Serving) -> None:
    if serving.process.poll() is None:
        serving.end(signal.SIGKILL)


def run(*arguments: str, env: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """A `keylane serve` that cannot start."""
    return keylane("serve", *arguments, status=None, **(env or {}))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_stops_at_a_signal(
    serve: Callable[..., Serving], how: signal.Signals
) -> None:
    """With status 0, and without leaving a process behind."""
    serving = serve()
    assert serving.ready["pid"] == serving.process.pid
    assert [worker["id"] for worker in serving.ready["workers"]] == ["worker-0"]
    assert len(serving.descendants) >= 2
    assert serving.end(how) == 0
    assert serving.left_behind() == []


def test_the_line_for_people_says_the_same(tmp_path: Path) -> None:
    """Scripts can wait for it too."""
    command = [KEYLANE, "serve", "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=plain_signals,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert process.wait(DEADLINE) == 0
    assert line.startswith("keylane is ready at keylane://127.0.0.1:")


async def test_a_restart_keeps_topics_subscriptions_and_messages(serve: Callable[..., Serving]) -> None:
    """All state is in the data directory."""
    first = serve()
    async with AsyncClient(first.url) as client:
        await client.create_topic("orders", partitions=2)
        await client.create_subscription("orders", "billing")
        published = await client.publish("orders", b"tea", key="anna")
    assert first.end(signal.SIGTERM) == 0
    second = serve()
    async with (
        AsyncClient(second.url) as client,
        client.subscribe("orders", "billing") as consumer,
    ):
        message = await consumer.receive(timeout=DEADLINE)
        assert (message.id, await message.data()) == (published.id, b"tea")
        await message.ack()


async def test_a_killed_worker_is_started_again_and_a_client_goes_on(serve: Callable[..., Serving]) -> None:
    """On the same port, without any help."""
    serving = serve()
    async with AsyncClient(serving.url) as client:
        await client.create_topic("orders", partitions=1)
        async with client.subscribe("orders", "billing") as consumer:
            os.kill(serving.ready["workers"][0]["pid"], signal.SIGKILL)
            await client.publish("orders", b"tea")
            message = await consumer.receive(timeout=DEADLINE)
            assert await message.data() == b"tea"
            await message.ack()
    assert serving.end(signal.SIGTERM) == 0
    assert serving.left_behind() == []


async def test_a_killed_embedded_server_is_started_again_and_a_client_goes_on(
    serve: Callable[..., Serving],
) -> None:
    """On the same port and the same data."""
    serving = serve()
    async with AsyncClient(serving.url) as client:
        await client.create_topic("orders", partitions=1)
        async with client.subscribe("orders", "billing") as consumer:
            info = dict(
                line.split(":", 1) for line in ask(serving.redis_port, "INFO").splitlines() if ":" in line
            )
            os.kill(int(info["process_id"]), signal.SIGKILL)
            await client.publish("orders", b"tea")
            message = await consumer.receive(timeout=DEADLINE)
            assert await message.data() == b"tea"
            await message.ack()
    assert serving.end(signal.SIGTERM) == 0
    assert serving.left_behind() == []


def test_when_it_is_killed_its_children_follow(serve: Callable[..., Serving]) -> None:
    """And the next one can use the data directory at once."""
    serving = serve()
    serving.end(signal.SIGKILL)
    assert serving.left_behind() == []
    assert serve().end(signal.SIGTERM) == 0


async def test_with_a_redis_of_its_own_it_starts_none(
    serve: Callable[..., Serving], server_url: str, topic: str, tmp_path: Path
) -> None:
    """The data directory stays as it was."""
    serving = serve("--redis", server_url)
    assert serving.ready["redis"] == server_url
    async with AsyncClient(serving.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.delete_topic(topic)
    assert serving.end(signal.SIGTERM) == 0
    assert not (tmp_path / "data").exists()


def test_settings_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    """A flag over the environment, that over the file."""
    ports = [free_port() for _ in range(3)]
    file = tmp_path / "keylane.toml"
    file.write_text(f'port = {ports[0]}\ndata_dir = "{tmp_path / "data"}"\nworkers = 1\n')
    command = [KEYLANE, "serve", "--json", "--config", str(file)]
    for environment, flags, port in [
        ({}, [], ports[0]),
        ({"KEYLANE_PORT": str(ports[1])}, [], ports[1]),
        ({"KEYLANE_PORT": str(ports[1])}, ["--port", str(ports[2])], ports[2]),
    ]:
        with subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
        ) as process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            process.terminate()
        assert ready["address"] == f"keylane://127.0.0.1:{port}"


def test_a_port_in_use_is_an_error_that_says_so(tmp_path: Path) -> None:
    """And nothing is left running."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run("--port", str(port), "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: 127.0.0.1:{port} is in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_directory_in_use_is_an_error_that_names_its_owner(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    """Two servers on the same data would destroy it."""
    serving = serve()
    done = run("--port", "0", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    assert f"is in use by process {serving.process.pid}" in done.stderr


def test_a_redis_that_cannot_be_reached_is_an_error() -> None:
    """By name, without a traceback."""
    done = run("--port", "0", "--redis", f"redis://127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (["--workers", "0"], {}, "error: --workers is '0'"),
        (["--workers", "2", "--port", "65535"], {}, "error: port is 65535: 2 workers need ports up to 65535"),
        (["--port", "many"], {}, "error: --port is 'many'"),
        ([], {"KEYLANE_SESSION": "0"}, "error: environment variable KEYLANE_SESSION is '0'"),
        (["--config", "nowhere.toml"], {}, "error: cannot read the configuration nowhere.toml"),
        (["--nonsense"], {}, "No such option"),
    ],
)
def test_settings_that_cannot_be_meant_are_usage_errors(
    arguments: list[str], environment: dict[str, str], text: str
) -> None:
    """With exit code 2 and what is wrong."""
    done = run(*arguments, env=environment)
    assert done.returncode == 2
    assert text in done.stderr


def test_usage_errors_come_as_json_too() -> None:
    """In the form that all errors have."""
    done = run("--workers", "0", "--json")
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["retriable"]) == ("usage", False)


@pytest.mark.parametrize(
    ("taken", "payloads"),
    [(False, ""), (True, ""), (False, "keylane+http://")],
    ids=["same address", "another address", "by way of workers"],
)
async def test_a_running_client_goes_on_after_serve_was_killed_and_started_again(
    serve: Callable[..., Serving], taken: bool, payloads: str
) -> None:
    """It publishes, and reads bodies of before and after, also where the store has another address."""
    port = str(free_port())
    more = ["--payloads", payloads, "--http-port", str(free_port())] if payloads else []
    first = serve("--port", port, *more)
    async with AsyncClient(first.url) as client, contextlib.AsyncExitStack() as stack:
        await client.create_topic("orders", partitions=1)
        consumer = await stack.enter_async_context(client.subscribe("orders", "billing", permits=1))
        await client.publish("orders", b"before", durability="fsync")
        await client.publish("orders", b"behind", durability="fsync")
        before = await consumer.receive(timeout=DEADLINE)
        first.end(signal.SIGKILL)
        assert first.left_behind() == []
        if taken:
            stack.enter_context(Server(port=first.redis_port))
        under_way = asyncio.gather(before.data(), client.publish("orders", b"meanwhile"))
        second = serve("--port", port, *more)
        assert (second.redis_port != first.redis_port) == taken
        assert (await under_way)[0] == b"before"
        await client.publish("orders", b"after")
        found = {b"before"}
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(StaleReceipt):
                await before.ack()
            while found != {b"before", b"behind", b"meanwhile", b"after"}:
                message = await consumer.receive()
                found.add(await message.data())
                await message.ack()
