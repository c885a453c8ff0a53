"""Lanes: which messages are delivered in order, and when the lease of a lane ends."""

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import eq
from time import monotonic

from keylane.consume.block import HANDED, Block, Span

_LANES = 1_000  # that are remembered without a need
_SLACK = 1.0  # seconds that clocks may differ by


class Lanes:
    """The lanes of what a consumer holds: all messages of a lane have one deadline, which moves."""

    def __init__(self) -> None:
        self.mode = "shared"
        self.lease = 30.0  # seconds
        self.blocks: dict[Block, None] = {}  # those with a message that is neither settled nor stale
        # Partition -> key, "" for all of it -> deadline of the lane, where it has moved.
        self._moved: dict[int, dict[str, float]] = {}
        self._many: dict[int, int] = {}  # partition -> lanes, to look whether they are too many
        # Lanes that were given more than a lease -> until when.
        self._extended: dict[tuple[int, str], float] = {}

    def lane(self, block: Block, index: int) -> str:
        """As in receipts: "" where there is no order, "=" for a whole partition, "=" and the key."""
        if self.mode == "shared":
            return ""
        if self.mode == "key_shared":
            key = block.texts[index * 3]
            return "=" + key if key else ""
        return "="

    def deadline(self, block: Block, index: int) -> float:
        """Return when the message's lease ends, by time.monotonic."""
        lane = self.lane(block, index)
        if not lane:
            return block.deadlines.get(index, block.deadline)
        own = block.lane_deadlines.get(lane, block.deadline)
        moved = self._moved.get(block.partition, {}).get(lane[1:], 0.0)
        return max(own, moved, self._extended.get((block.partition, lane), 0.0) if self._extended else 0.0)

    def extend_lanes(self, spans: Iterable[Span], deadline: float) -> None:
        """The lanes of some messages were extended: what is settled in them does not shorten that."""
        spans, now = list(spans), monotonic()
        self.restart(spans, deadline)
        for block, start, stop in spans:
            for lane in {self.lane(block, index) for index in range(start, stop)} - {""}:
                self._extended.pop((block.partition, lane), None)
                if deadline > now + self.lease + _SLACK:
                    self._extended[block.partition, lane] = deadline
        if len(self._extended) > _LANES:
            self._extended = {place: until for place, until in self._extended.items() if until > now}

    def begin_lanes(self, block: Block) -> None:
        """A lane whose deadline counts from its delivery had ended: with it went what it was given."""
        for index in range(len(block)):
            lane = self.lane(block, index)
            if lane not in block.lane_deadlines:
                self._extended.pop((block.partition, lane), None)

    def restart(self, spans: Iterable[Span], deadline: float) -> None:
        """The lanes of some messages have a new deadline."""
        if self.mode == "shared":
            return
        partition = 0
        for block, start, stop in spans:
            partition = block.partition
            lanes = self._moved.setdefault(partition, {})
            if self.mode != "key_shared":
                lanes[""] = deadline
            else:
                lanes.update(dict.fromkeys(block.texts[start * 3 : stop * 3 : 3], deadline))
                lanes.pop("", None)  # messages without a key have no lane
        count = len(self._moved.get(partition, ()))
        if count > self._many.get(partition, _LANES):
            self._many[partition] = 2 * sum(block.open for block in self.blocks) + _LANES
            if count > self._many[partition]:
                self._forget_lanes(partition)

    def _forget_lanes(self, partition: int) -> None:
        """Lanes come and go with their keys: keep those of which something is held."""
        held = {self.lane(block, index) for block, index in self.each() if block.partition == partition}
        lanes = self._moved[partition]
        self._moved[partition] = {key: lanes[key] for lane in held if (key := lane[1:]) in lanes}

    def apart(self, block: Block, start: int, stop: int) -> list[str] | None:
        """Return the lane of each message of a span if no two neighbours have the same key, else None."""
        keys = block.texts[start * 3 : stop * 3 : 3]
        if self.mode != "key_shared" or any(map(eq, keys, islice(keys, 1, None))):
            return None
        return ["=" + key if key else "" for key in keys]

    def runs(self, block: Block, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Cut a span into what one receipt can stand for: consecutive entries of one lane."""
        entries = block.entries
        lane = self.lane(block, start)
        if self.mode != "key_shared" and isinstance(entries, range):
            yield lane, start, stop
            return
        keys = block.texts[start * 3 : stop * 3 : 3] if self.mode == "key_shared" else [""] * (stop - start)
        key = keys[0]
        following = entries[start]
        begin = start
        for index, (own, entry) in enumerate(zip(keys, entries[start:stop], strict=True), start):
            if own != key or entry != following:
                yield lane, begin, index
                begin, key = index, own
                if self.mode == "key_shared":
                    lane = "=" + key if key else ""
            following = entry + 1
        yield lane, begin, stop

    def each(self) -> Iterator[tuple[Block, int]]:
        """Yield every message that is buffered or with the application."""
        for block in list(self.blocks):
            for index, state in enumerate(block.states):
                if state <= HANDED:
                    yield block, index
