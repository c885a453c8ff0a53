"""How the processes of a broker write their log: one line an event, on stderr."""

import logging
import sys
import time

__all__ = ["FailureLog", "start_logging"]

_AGAIN = 10.0  # seconds after which trouble that goes on is worth another line


def start_logging(level: str, who: str = "") -> None:
    """Log what is at least of this level; `who` says which of several processes a line comes from."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {who}{' ' if who else ''}%(name)s: %(message)s",
    )


class FailureLog:
    """Something that is tried again and again: a line when it begins, now and then, and when it is over."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._text = ""
        self._said = 0.0

    def failed(self, error: Exception) -> None:
        """It has failed, perhaps once more."""
        now, text = time.monotonic(), str(error)
        if text != self._text or now - self._said > _AGAIN:
            self._log.warning("%s: %s", self._what, text)
            self._text, self._said = text, now

    def recovered(self) -> None:
        """It has worked."""
        if self._text:
            self._log.warning("%s: works again", self._what)
            self._text = ""
