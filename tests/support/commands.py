"""`keylane`, as people and scripts run it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import forked

KEYLANE = str(Path(sys.executable).parent / "keylane")  # as it is installed, for what is about the process
DEADLINE = 150.0  # seconds, on a machine that has other things to do as well


def plain_signals() -> None:
    """For preexec_fn, where a signal is sent: whoever runs the tests may have blocked it, or ignore it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def keylane(
    *arguments: str,
    status: int | None = 0,
    input: str | bytes = b"",
    folder: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it has said; `status` is what it must exit with, None: any."""
    done = forked.run(
        "keylane",
        *arguments,
        input=input.encode() if isinstance(input, str) else input,
        timeout=DEADLINE,
        environment={**os.environ, **environment},
        folder=folder,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert status in (None, done.returncode), (arguments, done.returncode, out, err)
    assert "Traceback" not in err, (arguments, err)
    return subprocess.CompletedProcess(arguments, done.returncode, out, err)
