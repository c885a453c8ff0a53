"""What docs/spark.md shows does what it says."""

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from keylane_spark.source.options import READ_OPTIONS
from keylane_spark.source.schema import MESSAGES
from tests.support.running import ROOT, RunningBroker

PAGE = (ROOT / "docs" / "spark.md").read_text("utf-8")


def rows_of(section: str) -> list[str]:
    """The first column of the table of a section."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_the_session_on_the_first_screen_runs(
    spark: SparkSession,
    broker: RunningBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    # Relative paths are Java's, which does not follow.
    program = program.replace("keylane://127.0.0.1:9999", broker.url).replace('"warehouse/', f'"{tmp_path}/')
    exec(compile(program, "docs/spark.md", "exec"), {"__name__": "docs"})
    shown = capsys.readouterr().out
    assert re.search(r"\|customer-7\|42 apples\| +eu\|", shown)
    assert shown.splitlines()[-1] == "1"


def test_the_page_has_every_column_and_every_option() -> None:
    assert rows_of("Columns") == MESSAGES.names
    assert sorted(rows_of("Options")) == sorted(READ_OPTIONS)
