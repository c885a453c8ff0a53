"""compose.yaml and the Dockerfile, without an engine: they are read, and their commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from keylane import Client
from keylane.errors import ConnectionFailed
from keylane_broker.config import Settings
from keylane_broker.ports import free_port
from loadtest.topology import single_server

pytestmark = pytest.mark.slow  # each command is a process

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
OTHER_VARIABLES = {"KEYLANE_SERVER"}  # of the client's commands
START_SECONDS = 90.0


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services by name."""
    content = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    found: dict[str, Any] = content["services"]
    return found


def keylane_commands(service: dict[str, Any]) -> list[list[str]]:
    """The keylane commands that a service runs, as words."""
    health = service["healthcheck"]["test"]
    assert health[0] == "CMD"
    (script,) = service["command"]
    return [shlex.split(script.replace("$$", "$"))[1:], health[1:]]


def dockerfile() -> list[list[str]]:
    """The instructions of the Dockerfile, as words; lines that go on are joined."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [shlex.split(line) for line in lines]


def test_there_are_a_durable_valkey_and_a_worker_that_waits_for_it(services: dict[str, Any]) -> None:
    assert set(services) == {"valkey", "worker", "prometheus", "grafana", "spark", "spark-worker"}
    command = services["valkey"]["command"]
    settings = dict(zip(command[1::2], command[2::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--appendfsync"] == "everysec"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert services["valkey"]["volumes"] == ["valkey-data:/data"]
    assert services["worker"]["depends_on"] == {"valkey": {"condition": "service_healthy"}}


def test_every_service_has_a_health_check(services: dict[str, Any]) -> None:
    assert services["valkey"]["healthcheck"]["test"] == ["CMD", "valkey-cli", "ping"]
    assert services["worker"]["healthcheck"]["test"][1:3] == ["keylane", "doctor"]


def test_spark_is_there_for_those_who_ask_and_shares_a_folder_with_its_workers(
    services: dict[str, Any],
) -> None:
    master, worker = services["spark"], services["spark-worker"]
    assert master["profiles"] == worker["profiles"] == ["spark"]
    assert master["volumes"] == worker["volumes"] == ["archive:/archive"]
    address = dict(zip(master["command"][::2], master["command"][1::2], strict=True))
    assert worker["command"][0] == f"spark://{address['--host']}:{address['--port']}"
    stages = {words[-1]: words[1] for words in dockerfile() if words[0] == "FROM" and len(words) == 4}
    assert master["build"]["target"] == worker["build"]["target"]
    assert master["build"]["target"] in stages


def test_prometheus_and_grafana_are_there_for_those_who_ask_with_files_that_exist(
    services: dict[str, Any],
) -> None:
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["metrics"]
        assert "healthcheck" in services[name]
        for volume in services[name]["volumes"]:
            assert (ROOT / volume.partition(":")[0]).is_file()


def test_there_are_several_workers_and_there_can_be_more(services: dict[str, Any]) -> None:
    worker = services["worker"]
    replicas = worker["deploy"]["replicas"]
    assert replicas > 1
    assert "container_name" not in worker
    assert "hostname" not in worker
    for port in worker["ports"]:
        first, last, inside = map(int, re.fullmatch(r"(\d+)-(\d+):(\d+)", port).groups())  # type: ignore[union-attr]
        assert last - first + 1 > replicas
        assert inside == 9999


def test_a_worker_has_more_time_to_stop_than_it_gives_itself(services: dict[str, Any]) -> None:
    serve, _ = keylane_commands(services["worker"])
    own = float(serve[serve.index("--stop-timeout") + 1])
    assert float(services["worker"]["stop_grace_period"].removesuffix("s")) > own


def test_every_flag_and_variable_exists(services: dict[str, Any]) -> None:
    for words in keylane_commands(services["worker"]):
        assert words[0] == "keylane"
        shown = subprocess.run(
            [BIN / "keylane", words[1], "--help"], capture_output=True, text=True, check=True
        ).stdout
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"{flag}\b", shown), f"{flag} is not in `keylane {words[1]} --help`"
    known = {f"KEYLANE_{name.upper()}" for name in Settings.model_fields} | OTHER_VARIABLES
    in_image = {pair.partition("=")[0] for words in dockerfile() if words[0] == "ENV" for pair in words[1:]}
    used = set(services["worker"]["environment"]) | {name for name in in_image if name.startswith("KEYLANE_")}
    assert used <= known


@contextmanager
def running(
    command: list[str], environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to stop at the end, and does."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            yield process
            process.terminate()
            assert process.wait(START_SECONDS) == 0, (folder / "log").read_text()
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def server_url() -> Iterator[str]:
    """A server of its own: on the one that tests share there are partitions that nobody will ever serve."""
    with single_server() as server:
        yield server.url


def test_the_workers_command_starts_a_broker_that_its_health_check_finds_healthy(
    services: dict[str, Any], server_url: str, tmp_path: Path
) -> None:
    worker, port = services["worker"], free_port()
    (script,) = worker["command"]
    script = (
        script.replace("$$", "$").replace("redis://valkey:6379/0", server_url).replace("0.0.0.0", "127.0.0.1")
    )
    defaults = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in worker["environment"].items()
    }
    environment = {
        **os.environ,
        **defaults,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOSTNAME": "localhost",
        "KEYLANE_PORT": str(port),
        "KEYLANE_HTTP_PORT": str(free_port()),
        "KEYLANE_SERVER": f"keylane://127.0.0.1:{port}",
    }
    check = worker["healthcheck"]["test"][1:]
    unhealthy = subprocess.run(check, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert unhealthy.returncode == 1, unhealthy
    with running([*worker["entrypoint"], script], environment, tmp_path) as process:
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            healthy = subprocess.run(check, env=environment, cwd=tmp_path, capture_output=True, text=True)
            if healthy.returncode == 0:
                break
        assert healthy.returncode == 0, f"{healthy.stdout}{healthy.stderr}{(tmp_path / 'log').read_text()}"
        assert json.loads(healthy.stdout)


def test_workers_of_several_containers_are_one_cluster(
    services: dict[str, Any], server_url: str, tmp_path: Path
) -> None:
    """Each started by the command of the file, here on ports of its own."""
    (script,) = services["worker"]["command"]
    script = (
        script.replace("$$", "$").replace("redis://valkey:6379/0", server_url).replace("0.0.0.0", "127.0.0.1")
    )
    ports = [free_port() for _ in range(2)]
    with ExitStack() as stack:
        for port in ports:
            (folder := tmp_path / str(port)).mkdir()
            environment = {
                **os.environ,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "HOSTNAME": "localhost",
                "KEYLANE_PORT": str(port),
                "KEYLANE_HTTP_PORT": str(free_port()),
            }
            stack.enter_context(running([*services["worker"]["entrypoint"], script], environment, folder))
        expected = {f"localhost:{port}" for port in ports}
        end = time.monotonic() + START_SECONDS
        found: set[str] = set()
        while not expected <= found:
            assert time.monotonic() < end, found
            with suppress(ConnectionFailed), Client(f"keylane://127.0.0.1:{ports[0]}") as client:
                found = {worker.address for worker in client.cluster().workers}


def test_the_image_is_built_from_files_that_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    copies = [words[1:] for words in dockerfile() if words[0] == "COPY" and not words[1].startswith("--from")]
    sources = [source for words in copies for source in words[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), f"the Dockerfile copies {source}, which is not there"
        assert f"!{source}" in ignored, f"the Dockerfile copies {source}, which .dockerignore hides"


def test_the_image_has_every_package_of_the_wheel_and_runs_as_nobody_special() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = {package.partition("/")[0] for package in packages}
    copied = [words[1] for words in dockerfile() if words[0] == "COPY"]
    assert folders | {"lua"} <= set(copied)  # to which one of them links
    users = [words[1] for words in dockerfile() if words[0] == "USER"]
    assert users == ["keylane", "keylane"]  # one for each of the two images
    assert ["ENTRYPOINT", "[keylane]"] in dockerfile()
