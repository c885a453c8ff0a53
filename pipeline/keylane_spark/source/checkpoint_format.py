"""What Spark's checkpoint keeps of a query: its positions, and which topics and subscriptions they are of."""

from collections.abc import Mapping
from typing import Any

import msgspec

from keylane.errors import InvalidArgument
from keylane_spark.source.positions import Positions

# Among names of topics, in which there is no such character.
_IDENTITY = "#identity"
_INCARNATIONS = "#incarnations"
_LEDGERS = "#ledgers"  # by partition: all before the position was written in that one, or before


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the positions in a topic are of: others of these names have other numbers.

    `sought` has the partitions that a seek has moved. `ledgers` are by partition: all before the position was
    given in that one, or before. If the position is at an entry that was given later, the server has lost
    writes.
    """

    topic: int
    subscription: int
    sought: dict[int, int] = {}
    ledgers: dict[int, int] = {}

    def moves(self, partition: int) -> int:
        """A number that each seek makes larger."""
        return self.sought.get(partition, self.subscription)


Identities = dict[str, Identity]  # by topic


def dump(positions: Positions, identities: Identities) -> dict[str, Any]:
    """As Spark keeps it in the checkpoint: JSON has no numbers for keys."""
    return {**dump_positions(positions), _IDENTITY: msgspec.to_builtins(identities, str_keys=True)}


def dump_positions(positions: Positions) -> dict[str, Any]:
    """Positions alone, to be shown."""
    return {topic: {str(p): at for p, at in sorted(of.items())} for topic, of in sorted(positions.items())}


def load(offset: Mapping[str, Any]) -> tuple[Positions, Identities]:
    """What dump was given; InvalidArgument if it does not say which topics it is of."""
    named = {topic: of for topic, of in offset.items() if topic != _IDENTITY}
    try:
        positions = msgspec.convert(named, type=Positions, strict=False)
        identities = msgspec.convert(offset.get(_IDENTITY, {}), type=Identities, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"the checkpoint has {offset!r}, which is not an offset of keylane ({error}): is it another "
            "query's?"
        ) from None
    if unknown := positions.keys() - identities.keys():
        raise InvalidArgument(
            f"the checkpoint does not say which topic {min(unknown)!r} it is from: it was written by an "
            "older Keylane. Start the query with a new checkpointLocation"
        )
    return positions, identities


def common(before: Positions, begin: Positions) -> Positions:
    """The positions that are in both: where a query had to go back, what it reads is not what was there."""
    return {
        topic: {partition: at for partition, at in of.items() if begin.get(topic, {}).get(partition) == at}
        for topic, of in before.items()
    }


def dump_journal(positions: Positions, incarnations: Mapping[str, int], ledgers: Positions) -> dict[str, Any]:
    """As Spark keeps it in the checkpoint: JSON has no numbers for keys."""
    shown = dump_positions(positions)
    if incarnations:
        shown[_INCARNATIONS] = dict(sorted(incarnations.items()))
    if ledgers:
        shown[_LEDGERS] = dump_positions(ledgers)
    return shown


def load_journal(offset: Mapping[str, Any]) -> tuple[Positions, dict[str, int], Positions]:
    """What dump_journal was given; no ledgers in what an older Keylane has written."""
    named = {topic: of for topic, of in offset.items() if topic not in (_INCARNATIONS, _LEDGERS)}
    try:
        return (
            msgspec.convert(named, type=Positions, strict=False),
            msgspec.convert(offset.get(_INCARNATIONS, {}), type=dict[str, int]),
            msgspec.convert(offset.get(_LEDGERS, {}), type=Positions, strict=False),
        )
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"the checkpoint has {offset!r}, which is not an offset of a journal ({error}): is it another "
            "query's?"
        ) from None
