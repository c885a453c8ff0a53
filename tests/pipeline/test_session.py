"""Java: found, too old, or missing; and what the tests say when it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keylane_spark.session import BRING_JAVA, JavaMissing, find_java, java_version, require_java, session
from tests.support.running import ROOT


def java_that_says(folder: Path, text: str) -> Path:
    """A home of Java whose version is what the test wants."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_391"', 8),
        ("Unable to locate a Java Runtime.", 0),
    ],
)
def test_a_java_says_how_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: int
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, said)))
    java = find_java()
    assert java is not None
    assert java_version(java) == version
    if version < 17:
        with pytest.raises(JavaMissing, match=f"is Java {version}; Spark needs 17 or newer"):
            require_java()
    else:
        require_java()


def test_without_java_the_error_has_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="no Java found") as raised:
        require_java()
    assert BRING_JAVA in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("ci", [False, True])
def test_without_java_tests_with_spark_are_left_out_with_a_word_but_fail_on_ci(
    tmp_path: Path, ci: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST"))}
    environment |= {"JAVA_HOME": str(tmp_path)} | ({"CI": "true"} if ci else {})
    test = "tests/pipeline/test_source_batch.py::test_an_empty_topic_is_an_empty_table"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", test]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert BRING_JAVA in done.stdout
    assert done.returncode == (1 if ci else 0), done.stdout
    assert ("1 error" if ci else "1 skipped") in done.stdout


def test_a_start_that_is_interrupted_leaves_no_java_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(_: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("pyspark.sql.SparkSession.Builder.getOrCreate", start)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with pytest.raises(KeyboardInterrupt):
                session("interrupted")
            assert started[0].wait(60) == -signal.SIGTERM
            assert other.poll() is None, "it is not ours"
        finally:
            other.kill()
