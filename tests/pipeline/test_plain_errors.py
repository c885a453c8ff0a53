"""What a user sees of an error: what is wrong, at once, and no way through the code."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from keylane import Client, OutgoingMessage
from keylane.errors import InvalidArgument
from keylane_spark.plain_errors import plainly
from tests.pipeline.tables import Table

_REPORT = """
import sys, io
from pyspark.util import handle_worker_exception
from keylane_spark.plain_errors import plainly
from keylane import errors

@plainly
def fail():
    raise {error}("the words")

told = io.BytesIO()
try:
    fail()
except Exception as error:
    handle_worker_exception(error, told)
print(told.getvalue()[8:].decode())
"""


def told(error: str, folder: Path) -> str:
    """What Spark is told of an error in a process of its own."""
    (folder / "pyspark").mkdir()
    (folder / "pyspark" / "fails.py").write_text(_REPORT.format(error=error))
    # Run as Spark runs its workers, as a module of pyspark.
    run = (
        "import runpy, pyspark; pyspark.__path__.append(sys.argv[1]); "
        "runpy.run_module('pyspark.fails', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", f"import sys; {run}", str(folder / "pyspark")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_an_error_with_a_name_is_told_in_a_line(tmp_path: Path) -> None:
    assert told("errors.TopicNotFound", tmp_path).strip() == "keylane.errors.TopicNotFound: the words"


@pytest.mark.parametrize("error", ["errors.ProtocolError", "KeyError"])
def test_an_error_that_is_perhaps_a_defect_is_told_with_the_way_to_it(error: str, tmp_path: Path) -> None:
    assert told(error, tmp_path).startswith("Traceback")


def test_outside_of_spark_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)

    @plainly
    def fail() -> None:
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument):
        fail()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ


def failure(query: StreamingQuery) -> str:
    """Why a query ended."""
    try:
        query.awaitTermination(120)
    except Exception as error:
        return str(error)
    raise AssertionError("the query has not failed")


def test_a_user_of_spark_reads_what_is_wrong_first(
    client: Client,
    topic: str,
    read: Callable[..., DataFrame],
    stream: Callable[..., DataFrame],
    table: Table,
    other_table: Table,
) -> None:
    with pytest.raises(Exception, match=r"Failed to create Python data source instance: .*did you mean") as e:
        read(startingOfset="earliest")
    assert "Traceback" not in str(e.value)

    # An error in the making of a streaming source, which Spark has no place for.
    why = failure(table.start(stream(endingOffsets="latest")))
    assert "option 'endingOffsets' is for spark.read only" in why.splitlines()[0]
    assert "Traceback" not in why
    assert "UnboundLocalError" not in why

    # On an executor.
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "keeps", start="earliest")
    client.publish_many(topic, [OutgoingMessage("1")])
    why = failure(other_table.start(stream(payloads="file:///nowhere/at/all"), now=True))
    assert "the payload store has no body for 1 messages" in why.splitlines()[0]
    assert "Traceback" not in why
