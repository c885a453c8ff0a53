"""Where the `keylane` command begins: Ctrl-C while the rest is imported ends it without a word."""

import signal

__all__ = ["main"]


def main() -> None:
    """Import the command line, which takes its time, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from keylane_broker.commandline.main import main as run

    signal.signal(signal.SIGINT, before)
    run()
