"""How the processes of a broker write their log: one line an event, on stderr, as text or as JSON."""

import json
import logging
import sys
import time
from types import TracebackType

__all__ = ["FailureLog", "start_logging"]

_AGAIN = 10.0  # seconds after which trouble that goes on is worth another line


def start_logging(level: str, who: str = "", *, form: str = "text") -> None:
    """Log what is at least of this level; `who` says which of several processes a line comes from.

    In the form "json" a line is an object, also of what nobody expected: a warning, or a bug.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(who))
        logging.captureWarnings(True)
        sys.excepthook = _log_bug
    else:
        name = f"{who}{' ' if who else ''}%(name)s"
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC), level, logger, which of several processes, message, any traceback."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._who,
            "message": record.getMessage(),
            "traceback": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({name: value for name, value in line.items() if value}, ensure_ascii=False)


def _log_bug(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("keylane.broker").critical("ended by a bug", exc_info=(kind, error, traceback))


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
