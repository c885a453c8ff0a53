"""`keylane`, as people and scripts run it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.running import RunningBroker

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
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it has said; `status` is what it must exit with, None: any."""
    done = forked.run(
        "keylane",
        *arguments,
        input=input.encode() if isinstance(input, str) else input,
        timeout=DEADLINE,
        environment={**os.environ, **environment},
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert status in (None, done.returncode), (arguments, done.returncode, out, err)
    assert "Traceback" not in err, (arguments, err)
    for secret in ("KEYLANE_TOKEN", "KEYLANE_ADMIN_TOKEN"):
        assert not environment.get(secret) or environment[secret] not in out + err, (arguments, out, err)
    return subprocess.CompletedProcess(arguments, done.returncode, out, err)


def ask_keylane(broker: RunningBroker, *arguments: str, status: int = 0) -> Any:
    """Run a command on a broker and return what it prints, on stderr if it is to fail; JSON is decoded."""
    done = keylane(*arguments, status=None, KEYLANE_SERVER=broker.url)
    assert done.returncode == status, (arguments, done.stdout, done.stderr, broker.log())
    text = done.stderr if status else done.stdout
    return json.loads(text) if "--json" in arguments else text
