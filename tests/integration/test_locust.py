"""The Locust users drive a real broker, and what they measure is in Locust's own statistics."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import RunningBroker

ROOT = Path(__file__).parents[2]
SWITCH = "LOCUST_SKIP_MONKEY_PATCH"


def run_locust(folder: Path, server: str, topic: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run two producers and two consumers for some seconds, started the way anybody would."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    environment |= {
        "KEYLANE_SERVER": server,
        "KEYLANE_LOAD_TOPIC": topic,
        "KEYLANE_LOAD_BODY": "200",
        "KEYLANE_LOAD_KEYS": "20",
    }
    command = [str(Path(sys.executable).parent / "locust"), "-f", "loadtest/locustfile.py", "--headless"]
    return subprocess.run(
        [*command, "--users", "4", "--spawn-rate", "4", "--csv", str(folder / "load"), *options],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


def statistics(folder: Path) -> dict[str, dict[str, str]]:
    """Locust's figures by kind of request."""
    with (folder / "load_stats.csv").open(newline="") as file:
        return {row["Type"]: row for row in csv.DictReader(file) if row["Type"]}


@pytest.mark.slow
def test_producers_and_consumers_run_headless_without_a_failure(
    broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    ended = run_locust(tmp_path, broker.url, topic, "--run-time", "4s")
    assert ended.returncode == 0, ended.stderr
    figures = statistics(tmp_path)
    assert set(figures) == {"publish", "deliver"}, ended.stderr
    for kind, row in figures.items():
        assert int(row["Request Count"]) > 0, f"no {kind}: {ended.stderr}"
        assert int(row["Failure Count"]) == 0, ended.stdout
        assert float(row["Average Content Size"]) == 200
        assert float(row["Average Response Time"]) > 0
    assert int(figures["deliver"]["Request Count"]) <= int(figures["publish"]["Request Count"]) + 2


@pytest.mark.slow
def test_a_broker_that_is_not_there_is_a_failure_in_the_statistics(topic: str, tmp_path: Path) -> None:
    ended = run_locust(tmp_path, "keylane://127.0.0.1:1", topic, "--run-time", "2s")
    assert ended.returncode == 1, ended.stderr
    figures = statistics(tmp_path)
    assert set(figures) == {"connect"}, ended.stderr
    assert figures["connect"]["Failure Count"] == "4"
