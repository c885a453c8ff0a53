"""Settling in the background, against a model of the broker: random stories in virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

import pytest

from keylane import wire
from keylane.consume.block import HANDED, Block, Span
from keylane.consume.downloads import Downloads
from keylane.consume.leases import Leases
from keylane.consume.message import Message, Origin
from keylane.consume.open_blocks import OpenBlocks
from keylane.consume.receipts import GIVE_BACK
from keylane.consume.settle_calls import SettleCalls, SettleGroup
from keylane.consume.settler import Settler
from keylane.consume.streams import Streams
from keylane.errors import ConnectionClosed, InvalidArgument, StaleReceipt
from keylane.wire import Frame, Properties, Type
from tests.support.blocks import block
from tests.support.virtual_time import run_in_virtual_time

PARTITIONS = 2
LATEST = 0.051  # seconds that acks wait for those before them, and for their turn
Place = tuple[int, int]  # partition, entry


class Arrival(NamedTuple):
    """A frame as it came to the broker."""

    at: float
    kind: Properties
    places: list[Place]


class Broker:
    """Stands for the streams of a consumer and the broker behind them: knows who has what leased."""

    number = 1
    timeout = 30.0
    current = object()

    def __init__(self, delay: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.delay = delay  # seconds until it answers
        self._up = asyncio.Event()
        self._up.set()
        self.deaf = False  # what comes now is lost, not only its answer
        self.refuses = 0  # so many frames, for good
        self.leased: dict[Place, str] = {}  # or what became of it
        self.confirmed: set[Place] = set()  # settled, and the client has heard so
        self.doubtful: set[Place] = set()  # settled perhaps, as far as the client can know
        self.wrong: list[str] = []
        self.arrivals: list[Arrival] = []
        self.unanswered: dict[asyncio.Future[Frame], list[Place]] = {}

    def serving(self, partition: int) -> "Broker | None":
        return self if self.up else None

    async def reach(self, partition: int, within: float) -> "Broker":
        async with asyncio.timeout(within):
            await self._up.wait()
        return self

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self._up.is_set()

    def come_back(self) -> None:
        """Have a connection again."""
        self.deaf = False
        self._up.set()

    def doubt(self, partition: int, error: Exception) -> None:
        """Asks nobody."""

    def ask(self, partition: int, question: Properties, flat: list[Any]) -> asyncio.Future[Frame]:
        answer: asyncio.Future[Frame] = self.loop.create_future()
        asked = [
            (at // 4, (partition, entry))
            for at in range(0, len(flat), 4)
            for entry in range(flat[at + 2], flat[at + 3] + 1)
        ]
        places = [place for _, place in asked]
        self.arrivals.append(Arrival(self.loop.time(), question, places))
        self.wrong += [f"{place} is settled twice" for place in places if place in self.confirmed]
        self.wrong += [
            f"{place} is twice in a frame" for place, count in Counter(places).items() if count > 1
        ]
        if not self.up:
            answer.set_exception(ConnectionClosed("down"))
            return answer
        self.unanswered[answer] = places
        if self.refuses:
            self.refuses -= 1
            self.loop.call_later(self.delay, self._answer, answer, InvalidArgument("no"))
        elif not self.deaf:
            stale: list[int] = []
            for receipt, place in asked:
                if self.leased[place] == "leased":
                    self.leased[place] = _what(question)
                else:
                    stale += (receipt, place[1], place[1])
            properties = memoryview(wire.pack(wire.SettleReply(stale=stale, deadline_ms=60_000)))
            frame = Frame(Type.OK, 1, 0, properties, memoryview(b""))
            self.loop.call_later(self.delay, self._answer, answer, frame)
        return answer

    def _answer(self, answer: asyncio.Future[Frame], said: Frame | Exception) -> None:
        places = self.unanswered.pop(answer, [])
        if answer.done():  # the connection was lost
            return
        if isinstance(said, Exception):
            answer.set_exception(said)
        else:
            self.confirmed.update(place for place in places if self.leased[place] != "leased")
            answer.set_result(said)

    def lose(self) -> None:
        """Lose the connection, with all answers that are on their way."""
        self._up.clear()
        for answer, places in self.unanswered.items():
            if not answer.done():
                self.doubtful.update(places)
                answer.set_exception(ConnectionClosed("lost"))


def _what(question: Properties) -> str:
    if isinstance(question, wire.Nack):
        return "nacked" if question.charged else "given back"
    return "acked"


class Failed(Exception):
    """What an application says that cannot do its work."""


class Story:
    """An application's loop over messages, and what it knows about each."""

    def __init__(self, delay: float, settler: type[Settler] = Settler) -> None:
        self.broker = Broker(delay)
        self.told: list[Place] = []
        self.wanted: dict[Place, str] = {}
        self.when: dict[Place, float] = {}
        self.next = [1] * PARTITIONS
        self.leases = Leases(lambda partition, count: None, self._give_back)
        self.settler = settler(
            self.leases,
            cast(Streams, self.broker),
            on_extended=lambda deadline: None,
            on_stale=lambda held, index: self.told.append(_place(held, index)),
            delete_bodies=lambda names: None,
        )
        self.origin = Origin(
            "orders", lambda: 0.0, self.leases, self.settler, cast(Downloads, None), OpenBlocks()
        )

    def _give_back(self, spans: list[Span]) -> object:
        return self.settler.submit(GIVE_BACK, spans)

    def take(self, count: int, partition: int) -> list[Message]:
        """Put messages into the application's hands."""
        first = self.next[partition]
        self.next[partition] += count
        entries = [(entry, "") for entry in range(first, first + count)]
        held = block(entries, token=first, partition=partition, now=self.broker.loop.time(), lease=600.0)
        self.leases.add(held)
        held.states[:] = bytes((HANDED,)) * count
        self.broker.leased.update({(partition, entry): "leased" for entry, _ in entries})
        return [Message(held, index, self.origin) for index in range(count)]

    async def work(self, message: Message, how: str) -> None:
        """What happens inside the loop: `async with message` that is left in some way."""
        place = _place(message._block, message._index)
        self.wanted[place] = how
        self.when[place] = self.broker.loop.time()
        if how == "given back":
            working = asyncio.ensure_future(self._within(message, asyncio.sleep(3600.0)))
            await asyncio.sleep(0)
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        elif how == "nacked":
            with suppress(Failed):
                await self._within(message, _fail())
        else:
            await self._within(message, asyncio.sleep(0) if how == "slowly" else None)
            self.wanted[place] = "acked"

    async def _within(self, message: Message, body: Any) -> None:
        async with message:
            if body is not None:
                await body

    async def end(self) -> None:
        """Close as a consumer does, then look whether everybody knows what is true."""
        self.broker.come_back()
        async with asyncio.timeout(60.0):
            await self.settler.finish()
        await self.settler.close()
        wrong = self.broker.wrong
        for place, how in self.wanted.items():
            told, became = self.told.count(place), self.broker.leased[place]
            if told > 1:
                wrong.append(f"{place} is told {told} times")
            if became == how and told and place not in self.broker.doubtful:
                wrong.append(f"{place} is {became}, and told to be stale")
            gone = how != "acked" and place in self.broker.doubtful  # it comes again, one way or another
            if became != how and not told and not gone:
                wrong.append(f"{place} is {became} instead of {how}, and nobody is told")
        wrong += [f"{place} is told, and nobody asked" for place in self.told if place not in self.wanted]
        assert not wrong


def _place(held: Block, index: int) -> Place:
    return held.partition, held.entries[index]


async def _fail() -> None:
    raise Failed


HOW = ("acked", "acked", "acked", "slowly", "nacked", "given back")
TROUBLE = ("lose", "deaf", "refuse", "end lease")


def random_story(dice: random.Random, *, trouble: bool = True, settler: type[Settler] = Settler) -> None:
    """A loop of some hundred messages, with pauses, cancellations and all that can go wrong."""

    async def story() -> None:
        told = Story(dice.choice((0.0005, 0.003, 0.02, 0.2)), settler)
        broker = told.broker
        for _ in range(dice.randrange(1, 12)):
            what = dice.choice((*TROUBLE, *("take",) * 6)) if trouble else "take"
            if what == "lose":
                broker.lose()
                broker.loop.call_later(dice.choice((0.001, 0.3)), broker.come_back)
            elif what == "deaf":
                broker.deaf = True
                broker.loop.call_later(0.03, broker.lose)
                broker.loop.call_later(0.1, broker.come_back)
            elif what == "refuse":
                broker.refuses += 1
            messages = told.take(dice.choice((1, 3, 40, 700)), dice.randrange(PARTITIONS))
            if what == "end lease":
                lost = _place(messages[-1]._block, messages[-1]._index)
                broker.leased[lost] = "ended"
            usual = dice.choice(("acked", "slowly", None))
            for message in messages:
                await told.work(message, usual or dice.choice(HOW))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.choice((0.001, 0.01, 0.5)))
        await told.end()
        if not trouble:
            in_time(told)

    run_in_virtual_time(story())


def in_time(told: Story) -> None:
    """What nobody waits for goes out soon, whatever is under way."""
    came = {place: arrival.at for arrival in told.broker.arrivals for place in arrival.places}
    late = {place: came[place] - at for place, at in told.when.items() if came[place] - at > LATEST}
    assert not late


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_each_message_is_settled_once_or_somebody_hears_why_not(part: int) -> None:
    for seed in range(part, 240, 4):
        random_story(random.Random(seed))


@pytest.mark.slow
def test_whatever_is_under_way_nothing_waits_for_long() -> None:
    for seed in range(100):
        random_story(random.Random(seed), trouble=False)


def test_while_acks_are_under_way_the_next_gather() -> None:
    gathering_story(Settler)


def gathering_story(settler: type[Settler]) -> None:
    async def story() -> None:
        told = Story(0.02, settler)
        for message in told.take(100, 0):
            await told.work(message, "acked")
            await asyncio.sleep(0.001)
        await told.end()
        sizes = [len(arrival.places) for arrival in told.broker.arrivals]
        assert sizes[0] <= 3, "the first waits for nothing but a little company"
        assert all(15 <= size <= 25 for size in sizes[1:-1]), sizes
        in_time(told)

    run_in_virtual_time(story())


def test_acks_go_along_before_what_somebody_waits_for() -> None:
    """So that of a lane nothing overtakes what the application did before."""

    async def story() -> None:
        told = Story(0.02)
        messages = told.take(10, 0)
        for message in messages[:8]:
            await told.work(message, "acked")
            await asyncio.sleep(0.001)
        await messages[8].ack()
        kinds = [len(arrival.places) for arrival in told.broker.arrivals]
        assert sum(kinds) == 9
        assert kinds[-1] == 1
        await told.work(messages[9], "acked")
        await told.end()

    run_in_virtual_time(story())


def test_an_answer_that_never_comes_holds_nothing_back_for_long() -> None:
    async def story() -> None:
        told = Story(20.0)
        for message in told.take(3, 0):
            await told.work(message, "acked")
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [len(arrival.places) for arrival in told.broker.arrivals] == [1, 2]
        in_time(told)
        await told.end()

    run_in_virtual_time(story())


async def _without_waiting(self: Settler) -> None:
    self._closed = True


def _forgets_those_who_wait(self: Settler, group: SettleGroup) -> None:
    """Does nothing when an answer comes."""


def _settles_twice(self: Settler, block: Block, index: int, kind: Any) -> bool:
    before = block.states[index]
    found = Settler.settle_later(self, block, index, kind)
    if before == HANDED and index % 7 == 0:
        block.states[index] = HANDED
        Settler.settle_later(self, block, index, kind)
    return found


def _tells_nobody(self: SettleCalls, group: SettleGroup, error: Exception | None) -> None:
    group.later = False
    _end(self, group, error)


def _asks_once(self: SettleCalls, group: SettleGroup, *rest: Any) -> None:
    if group in self.under_way:
        self._end(group, None)


_end = SettleCalls._end


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        pytest.param(Settler, "finish", _without_waiting, id="closing sends nothing"),
        pytest.param(Settler, "_ended", _forgets_those_who_wait, id="an answer lets nothing go"),
        pytest.param(SettleCalls, "_end", _tells_nobody, id="nobody hears of what is stale"),
        pytest.param(SettleCalls, "_answered", _asks_once, id="a lost answer is taken for a yes"),
        pytest.param(
            SettleCalls, "_undo", lambda self, group, error: None, id="a refusal is taken for a yes"
        ),
    ],
)
def test_a_planted_defect_is_found(
    owner: type, name: str, defect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises((AssertionError, StaleReceipt, TimeoutError)):
        many_stories(Settler)


def test_what_is_settled_twice_is_found() -> None:
    class Twice(Settler):
        settle_later = _settles_twice

    with pytest.raises(AssertionError, match="twice"):
        many_stories(Twice)


def many_stories(settler: type[Settler]) -> None:
    gathering_story(settler)
    for seed in range(200):
        random_story(random.Random(seed), settler=settler)
        random_story(random.Random(seed), settler=settler, trouble=False)
