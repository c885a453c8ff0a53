"""Spark drivers as processes of their own, which can be killed with all that they have started."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.java import QUICK

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
START_SECONDS = 240.0  # on a machine that has other things to do as well
QUICK_JAVA = ("--conf", f"spark.driver.extraJavaOptions={QUICK}")


class Driver:
    """A driver and its Java, in a process group of their own, which ends with the `with`."""

    def __init__(self, *command: str | Path, **environment: str) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=self._output,
            cwd=ROOT,
            start_new_session=True,
            text=True,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", **environment},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._output.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        """End driver and Java with SIGKILL, in the middle of whatever they do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def until(self, happens: Callable[[], object], *, or_ends: bool = False) -> bool:
        """Wait until something happens; False if it ended before, where that is all right."""
        end = time.monotonic() + START_SECONDS
        while not happens():
            if self._process.poll() is not None:
                assert or_ends, self.errors()
                return False
            assert time.monotonic() < end, self.errors()
            time.sleep(0.001)
        return True

    def finish(self) -> str:
        """Wait until it ends well; what it has printed."""
        try:
            said, _ = self._process.communicate(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver does not end:\n{self.errors()}") from None
        assert self._process.returncode == 0, self.errors()
        return said

    def errors(self) -> str:
        """What it has told people so far."""
        self._output.seek(0)
        return self._output.read()


def keylane(*words: str, master: str = "local[2]") -> Sequence[str | Path]:
    """The command line of a job."""
    return [BIN / "keylane", "pipeline", *words, "--master", master, *QUICK_JAVA]
