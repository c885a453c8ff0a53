"""What the README says of Spark, typed line by line."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.java import QUICK
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

# Runs commands one after the other, all with one Java.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from keylane_broker.commandline.main import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    print(json.dumps(done.stdout))
"""


def test_the_commands_of_the_readme_tell_one_story_and_can_be_typed_again(
    new_java: None, tmp_path: Path
) -> None:
    section = re.search(r"### Spark\n(.*?)\n##", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert section is not None
    lines = [line.strip() for line in section[1].splitlines() if line.startswith("    keylane ")]
    jobs = ("archive", "audit", "skew", "replay")
    assert all(any(f"pipeline {job}" in line for line in lines) for job in jobs)
    commands = [[*shlex.split(line, comments=True), "--json"] for line in lines]
    with RunningBroker(workers=2) as broker:
        environment = {
            **os.environ,
            "KEYLANE_SERVER": broker.url,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "JAVA_TOOL_OPTIONS": QUICK,
        }

        def run(*command: str) -> str:
            done = subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            return done.stdout

        first = [run(*words) for words in commands]
        # What is typed again meets what is in the folder and the broker, for which one process will do.
        again = run(sys.executable, "-c", PROGRAM, json.dumps([words[1:] for words in commands]))
    stories = [told(commands, said) for said in (first, map(json.loads, again.splitlines()))]
    for said in stories:
        assert json.loads(said["audit"])["verdict"] == "complete"
        assert json.loads(said["archive"])["rows"] == 1
        assert json.loads(said["replay"])["rows"] == 1
    assert [json.loads(said["replay"])["stored"] for said in stories] == [1, 0]  # that run is done


def told(commands: Sequence[Sequence[str]], said: Iterable[str]) -> dict[str, str]:
    """What each job has printed."""
    return {words[2]: text for words, text in zip(commands, said, strict=True)}
