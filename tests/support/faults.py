"""What tests do to servers."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from keylane_broker.supervise.embedded_server import Server


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A server that holds its connections and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
