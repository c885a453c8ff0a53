"""How far a replay is: the note in the archive's state, by which a run that was stopped goes on."""

from typing import Any

import msgspec

from keylane_spark.replaying.rounds import Cut, Stretch


class ReplayNote(msgspec.Struct):
    """How far a run is: which rows are in which round is settled when it begins."""

    choice: dict[str, Any]
    target: int  # the incarnation of the topic
    stretches: list[Stretch]
    cuts: list[Cut]  # the last row of each round
    done: int = 0  # rounds
    begun: float | None = None  # unix time at which the next one was begun, if it was
    sizes: list[int] = []  # the rows of each round; none in the note of an older version

    @property
    def rows(self) -> int:
        """How many there are to replay."""
        return sum(self.sizes) if self.sizes else sum(item.rows for item in self.stretches)

    @property
    def rounds(self) -> int:
        """How many there are."""
        return len(self.cuts)
