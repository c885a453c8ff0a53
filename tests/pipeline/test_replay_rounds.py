"""Which rounds of a replay are done, without Spark: a round's rows and what became of them are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from pyspark.sql import SparkSession

from keylane import Client, InvalidArgument, SubscriptionNotFound, Tally
from keylane_spark.files import LocalFiles
from keylane_spark.replaying.options import ReplayOptions
from keylane_spark.replaying.progress import ReplayNote
from keylane_spark.replaying.replay import Replay
from keylane_spark.replaying.rounds import Cut, Found, Stretch
from tests.pipeline.inbox import make_topic
from tests.support.running import RunningBroker

ROUNDS = [Cut(1, 1, 0, 50), Cut(2, 1, 0, 100)]


class Rounds(Replay):
    """Two rounds of 50 rows, of which so many are found and become what is told."""

    found = Found(50, 50)
    told = Tally(stored=50)
    published = 0

    def _plan(self, choice: dict[str, Any], window: float) -> ReplayNote:
        stretches = [Stretch(0, 1, 100, 1, 2, 100)]
        return ReplayNote(choice, self._incarnation(), stretches, ROUNDS, sizes=[50, 50])

    def _chosen(self, note: ReplayNote, number: int) -> Any:
        return self

    def _publish(self, note: ReplayNote, rows: object, count: int, window: float) -> Tally:
        self.published += 1
        self._write(note)
        return self.told


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> Callable[..., Rounds]:
    monkeypatch.setattr("keylane_spark.replaying.replay.files_at", lambda path, spark: LocalFiles())
    monkeypatch.setattr("keylane_spark.replaying.replay.found_in", lambda rows: rows.found)
    make_topic(client, topic)

    def make(**given: Any) -> Rounds:
        options = {"server": broker.url, "path": f"{tmp_path}/archive", "topic": topic, "source": "orders"}
        return Rounds(cast("SparkSession", None), ReplayOptions(**(options | given)), print)

    return make


def test_a_round_with_fewer_rows_than_planned_is_not_begun(make: Callable[..., Rounds]) -> None:
    short = make()
    short.found = Found(60, 34)  # many of them twice
    message = (
        r"^round 1 of 2 of run 'replay' has 50 rows, of which the archive has 34 .* start it again [^\n]*$"
    )
    with pytest.raises(InvalidArgument, match=message):
        short.run()
    assert short.published == 0
    whole = make().run()
    assert (whole.rows, whole.stored, whole.rounds, whole.resumed) == (100, 100, 2, False)


@pytest.mark.parametrize("found", [Found(50, 50), Found(70, 50), Found(51, 51)])
def test_rows_that_are_there_twice_or_came_later_are_no_error(
    make: Callable[..., Rounds], found: Found
) -> None:
    rounds = make()
    rounds.found, rounds.told = found, Tally(stored=50, duplicates=found.rows - 50)
    assert rounds.run().rounds == 2
    assert make().run().rounds == 0


def test_a_round_that_published_fewer_rows_than_it_found_is_not_done(make: Callable[..., Rounds]) -> None:
    short = make()
    short.told = Tally(stored=30, duplicates=19)
    with pytest.raises(InvalidArgument, match=r"^49 of 50 rows of round 1 of 2 .*were published[^\n]*$"):
        short.run()
    assert make().run().rounds == 2


def test_a_round_of_which_rows_found_no_subscription_is_not_done(make: Callable[..., Rounds]) -> None:
    """Also where there is one again at its end."""
    alone = make()
    alone.told = Tally(stored=25, no_subscribers=25)
    with pytest.raises(SubscriptionNotFound, match=r"^25 of 50 rows of round 1 of 2 .*not stored[^\n]*$"):
        alone.run()
    assert make().run().rounds == 2


def test_the_note_of_an_older_version_is_gone_on_with(make: Callable[..., Rounds]) -> None:
    rounds = make()
    rounds.told = Tally(stored=1)
    with pytest.raises(InvalidArgument):
        rounds.run()
    [path] = Path(f"{rounds._options.root}.keylane/replays").iterdir()
    note = msgspec.json.decode(path.read_bytes())
    assert note.pop("sizes") == [50, 50]
    path.write_bytes(msgspec.json.encode(note))
    result = make().run()
    assert (result.rows, result.rounds) == (100, 2)


def test_a_run_with_a_long_name_has_a_note(make: Callable[..., Rounds]) -> None:
    for run_id in ("é" * 150 + "1", "é" * 150 + "2"):
        assert make(run_id=run_id).run().rounds == 2
        assert make(run_id=run_id).run().rounds == 0
