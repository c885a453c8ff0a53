"""What the README says of Spark, typed line by line."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.java import QUICK
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def test_the_commands_of_the_readme_tell_one_story_and_can_be_typed_again(
    new_java: None, tmp_path: Path
) -> None:
    section = re.search(r"### Spark\n(.*?)\n##", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert section is not None
    lines = [line.strip() for line in section[1].splitlines() if line.startswith("    keylane ")]
    jobs = ("archive", "audit", "skew", "replay")
    assert all(any(f"pipeline {job}" in line for line in lines) for job in jobs)
    with RunningBroker(workers=2) as broker:
        environment = {
            **os.environ,
            "KEYLANE_SERVER": broker.url,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "JAVA_TOOL_OPTIONS": QUICK,
        }
        stories: list[dict[str, str]] = []
        for line in lines * 2:
            if line is lines[0]:
                said: dict[str, str] = {}
                stories.append(said)
            done = subprocess.run(
                [*shlex.split(line, comments=True), "--json"],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            said[line.split()[2]] = done.stdout
    for said in stories:
        assert json.loads(said["audit"])["verdict"] == "complete"
        assert json.loads(said["archive"])["rows"] == 1
        assert json.loads(said["replay"])["rows"] == 1
    assert [json.loads(said["replay"])["stored"] for said in stories] == [1, 0]  # that run is done
