"""What producers number against the model: each message is stored once, however often a frame arrives."""

from typing import ClassVar, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import STALE, Capacity, NumberedFrame, Outgoing, Published
from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, KEYS, MANY, SECONDS, SESSIONS_MS, UNTIL_FOUND, BrokerMachine, explore

pytestmark = pytest.mark.timeout(SECONDS)

GIVEN_UP_MS = 59_000  # after which a client sends nothing again, and nothing of it is on its way


class Sent(NamedTuple):
    """A frame as it went out."""

    frame: NumberedFrame
    messages: list[Outgoing]
    at_ms: int


class Producer:
    """A client: it numbers what it sends, and sends again what was not answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.next_number = 1
        self.newest = 0  # number that was stored
        self.unanswered: list[Sent] = []
        self.copies: list[Sent] = []  # that are still on their way somewhere, and that nobody waits for

    def number(self, messages: list[Outgoing], now: int) -> Sent:
        """Return a new frame."""
        first = self.next_number
        self.next_number += len(messages)
        sent = Sent(NumberedFrame(self.name, first, first, len(messages)), messages, now)
        self.unanswered.append(sent)
        return self.again(sent)

    def again(self, sent: Sent) -> Sent:
        """Return a frame as it goes out now."""
        oldest = min(one.frame.number for one in self.unanswered)
        return sent._replace(frame=sent.frame._replace(oldest=oldest))

    def answered(self, sent: Sent) -> None:
        """Nobody waits for it any more, but a copy of it may come late."""
        self.unanswered = [one for one in self.unanswered if one.frame.number != sent.frame.number]
        self.copies = [*self.copies, sent][-4:]

    def give_up(self, now: int) -> None:
        """Forget what is too old."""
        self.unanswered = [one for one in self.unanswered if now - one.at_ms < GIVEN_UP_MS]
        self.copies = [one for one in self.copies if now - one.at_ms < GIVEN_UP_MS]


Step = tuple[int, str, int, bool]  # which producer, what, how many messages or how far back, answer lost
steps = st.tuples(
    st.integers(0, 1),
    st.sampled_from(("new", "new", "new", "lost", "again", "again", "give up", "copy")),
    st.integers(1, 4),
    st.booleans(),
)


class ProducerMachine(BrokerMachine):
    """Everything that may happen, and producers that number their messages besides."""

    mode = "shared"
    ordinary = True
    producers: list[Producer] | None = None
    made = 0  # messages

    @rule(chosen=st.lists(steps, min_size=1, max_size=4), turn=st.booleans())
    def send(self, chosen: list[Step], turn: bool) -> None:
        """Frames arrive together: new ones, some again, and late copies."""
        if self.producers is None:
            self.producers, self.ids = [Producer("p0"), Producer("p1")], dict[str, str]()
        now = self.both.now
        arriving: list[tuple[Producer, Sent, bool]] = []
        answered: list[tuple[Producer, Sent]] = []
        for which, what, count, lost in chosen:
            producer = self.producers[which]
            producer.give_up(now)
            if what == "new":
                sent = producer.number([self._message() for _ in range(count)], now)
            elif what == "lost":  # what is behind it is stored: as if it had been refused
                producer.number([self._message() for _ in range(count)], now)
                continue
            elif what == "copy" and producer.copies:
                arriving.append((producer, producer.copies[-1 - count % len(producer.copies)], True))
                continue
            elif not producer.unanswered:
                continue
            elif what == "give up":
                producer.answered(producer.unanswered[0])
                continue
            else:
                sent = producer.again(producer.unanswered[count % len(producer.unanswered)])
            arriving.append((producer, sent, False))
            if not lost:
                answered.append((producer, sent))
        if arriving:
            self._arrive(arriving, turn)
        for producer, sent in answered:
            producer.answered(sent)

    def _message(self) -> Outgoing:
        self.made += 1
        return Outgoing(KEYS[self.made * 7 % len(KEYS)], f"n{self.made}", "1  7 ")

    def _arrive(self, arriving: list[tuple[Producer, Sent, bool]], turn: bool) -> None:
        both = self.both
        frames = [sent.frame for _, sent, _ in arriving]
        messages = [message for _, sent, _ in arriving for message in sent.messages]
        late = [copy for _, sent, copy in arriving for _ in sent.messages]
        numbers = [
            (producer, number)
            for producer, sent, _ in arriving
            for number in range(sent.frame.number, sent.frame.number + len(sent.messages))
        ]
        passed = [number < producer.newest for producer, number in numbers]  # by others
        fresh = len({one.uid for one in messages}) == len(messages) and not any(
            one.uid in self.ids for one in messages
        )
        if turn and fresh and "main" in both.partition.subscriptions and not any(late):
            room = Capacity("c1", 3, 5_000)
            if not both.sub("main").is_open("c1", both.now):
                both.join("main", "c1", SESSIONS_MS[0])
            both.fetch("main", [room._replace(permits=100)], 1_000)  # most of the time it has all then
            first = both.partition.last + 1
            if both.turn("main", messages, [room], [], frames):
                for entry, message in enumerate(messages, first):
                    self.ids[message.uid] = f"{both.lease.epoch}-{entry}"
                self._note(numbers, messages)
                return
        told = both.do("numbered", both.engine.publish(both.lease, messages, frames=frames), frames).each()
        new: list[tuple[Outgoing, Published]] = []
        known = dict(self.ids)
        for message, answer, copy, refused in zip(messages, told, late, passed, strict=True):
            if (first_id := known.get(message.uid)) is not None:
                right = [Published(first_id, duplicate=True)]
                assert answer in ([*right, Published(STALE, duplicate=True)] if copy else right), message
            elif copy and answer == Published(STALE, duplicate=True):
                continue
            elif refused:
                assert answer == Published(None, no_subscribers=True), f"{message} is behind others"
            else:
                assert not answer.duplicate, f"{message} was never stored"
                new.append((message, answer))
                if answer.id:
                    known[message.uid] = answer.id
        both.uids.update({str(answer.id): message.uid for message, answer in new})
        both.partition.publish(both.now, both.lease.epoch, [m for m, _ in new], [a for _, a in new])
        self.ids = known
        self._note(numbers, messages)

    def _note(self, numbers: list[tuple[Producer, int]], messages: list[Outgoing]) -> None:
        """Know up to which number each producer's messages are stored."""
        for (producer, number), message in zip(numbers, messages, strict=True):
            if message.uid in self.ids:
                producer.newest = max(producer.newest, number)


class FilteredProducers(ProducerMachine):
    """Some of a frame are not stored."""

    filters: ClassVar = {"main": Filter("a*"), "other": Filter("b")}
    ordinary = False


def _with_few_stretches() -> dict[str, str]:
    """The scripts with little room in the record of a producer."""
    sources = read_sources()
    text = "local STRETCHES = 64"
    assert sources["lib/producers"].count(text) == 1
    sources["lib/producers"] = sources["lib/producers"].replace(text, "local STRETCHES = 2")
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("machine", [ProducerMachine, FilteredProducers])
def test_what_is_numbered_is_stored_once_in_many_runs(
    machine: type[ProducerMachine], server_url: str
) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


@pytest.mark.slow
def test_what_is_numbered_is_stored_once_where_records_have_little_room(server_url: str) -> None:
    """What does not fit is known by its uid."""
    explore(ProducerMachine, server_url, FEW, sources=_with_few_stretches())


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str


DEFECTS = {
    "a number below the newest passes for one that was stored": Defect(
        "lib/producers", "return number < record.oldest and STALE", "return number <= record.newest and STALE"
    ),
    "what was refused is stored behind what came after it": Defect(
        "partition/publish", "not first_ids[index] and number < record.newest", "false"
    ),
    "a number that nobody waits for is stored": Defect(
        "lib/producers",
        "return number < record.oldest and STALE",
        "return false",
    ),
    "a stretch is counted from its last number": Defect(
        "lib/producers", "stretch[4] + number - stretch[1]", "stretch[4] + stretch[2] - number"
    ),
    "stretches go too early": Defect(
        "lib/producers", "if stretch[2] >= oldest then", "if stretch[1] > oldest then"
    ),
    "a stretch goes on over entries of others": Defect(
        "lib/producers", "and newest[4] + number - newest[1] == entry then", "then"
    ),
    "a stretch goes on over another ledger": Defect(
        "lib/producers", "newest[3] == ledger and newest[4] + number - newest[1] == entry", "true"
    ),
    "what a publish stores is not noted": Defect(
        "partition/publish", "  write_producers(records, marks.newer)\n", ""
    ),
    "what a turn stores is not noted": Defect("subscription/turn", "  write_producers(records, marks)\n", ""),
    "a turn notes numbers one entry too far": Defect(
        "subscription/turn", "last_entry + place) then", "last_entry + place + 1) then"
    ),
    "what a turn stores of one frame is not noted": Defect(
        "subscription/turn", "  redis.call('HSET', producers_of(marks), frames[1], record_text)\n", ""
    ),
    "a turn notes the numbers of one frame one entry too far": Defect(
        "subscription/turn", "marks, ledger, last_entry + 1)", "marks, ledger, last_entry + 2)"
    ),
    "a stretch goes on over entries of others, for one frame": Defect(
        "lib/producers", "and entry - from == number - first then", "then"
    ),
    "a stretch goes too early for one frame": Defect(
        "lib/producers", "elseif last < oldest then", "elseif last <= oldest then"
    ),
}
LITTLE_ROOM = {
    "what a full record has no room for is not marked": Defect(
        "partition/publish", "if not noted or named[index] then", "if not records or named[index] then"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DEFECTS, *LITTLE_ROOM])
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    file, text, becomes = (DEFECTS | LITTLE_ROOM)[name]
    sources = _with_few_stretches() if name in LITTLE_ROOM else read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, ValueError)):
        explore(ProducerMachine, server_url, UNTIL_FOUND, sources=sources, planted=True)
