"""The log of a broker, as JSON."""

import json
import logging
import sys

from keylane_broker.logs import JsonFormatter


def test_a_line_is_an_object_whatever_the_message_has_in_it() -> None:
    record = logging.LogRecord("keylane.broker", logging.WARNING, "f", 1, 'a "%s"\nb', ("ä",), None)
    record.created, record.msecs = 1794978000.25, 250.0
    line = JsonFormatter("worker-1").format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-11-18T05:00:00.250Z",
        "level": "warning",
        "logger": "keylane.broker",
        "process": "worker-1",
        "message": 'a "ä"\nb',
    }


def test_a_bug_comes_with_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "a bug", (), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert "ValueError: why" in line["traceback"]
    assert "process" not in line
