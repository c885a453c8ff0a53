"""kill -9 of the worker, and of the server, at each step of what takes several: none is lost or doubled."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from keylane import AsyncClient, OutgoingMessage
from keylane.errors import BrokerError
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import partition_keys
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker
from tests.support.waiting import POLL, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 5  # messages: a portion and a part of one
BODIES = Counter(f"body {n}" for n in range(COUNT))
SOON = 120.0
OF_OUTBOX = r"\}:(dead|outbox)$"
OF_BODIES = r"\}:bodies$|release_held"


class Scene:
    """A topic with its messages, and what is known of them."""

    def __init__(self, broker: RunningBroker, client: AsyncClient, engine: Engine, topic: str) -> None:
        self.broker, self.client, self.engine, self.topic = broker, client, engine, topic
        self.dead = f"{topic}.dead"

    async def publish(self, *subscriptions: str, **settings: float) -> None:
        """Make the topic, and messages of one key with a body each."""
        await self.client.create_topic(self.topic, partitions=1, **settings)  # type: ignore[arg-type]
        for name in subscriptions:
            await self.client.create_subscription(self.topic, name, max_retries=0)
        await self.client.publish_many(self.topic, [OutgoingMessage(text, key="k") for text in BODIES])

    async def take(self, name: str, count: int) -> Counter[str]:
        """Ack so many messages; answers their bodies."""
        found: Counter[str] = Counter()
        async with self.client.subscribe(self.topic, name, mode=None) as consumer:
            for _ in range(count):
                message = await consumer.receive(SOON)
                found[(await message.data()).decode()] += 1
                await message.ack()
        return found

    async def fail_all(self) -> None:
        """Nack whatever comes."""
        async with self.client.subscribe(self.topic, "s", mode=None) as consumer:
            async for message in consumer:
                with suppress(BrokerError):  # it comes again
                    await message.nack(delay=0)

    async def bury_all(self) -> None:
        """Let all become dead letters."""
        failing = asyncio.ensure_future(self.fail_all())
        await until(self.is_handed_off)
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)

    async def is_handed_off(self) -> bool:
        return (
            await self.length("log") == 0
            and await self.length("log", self.dead) == COUNT
            and await self.is_quiet()
        )

    async def is_quiet(self) -> bool:
        """Whether nothing is on its way, and no body is still to be deleted."""
        names = {self.topic, self.dead} & set(await self.engine.topics())
        return not any(
            [await self.length(part, name) for part in ("dead", "outbox", "bodies") for name in names]
        )

    async def length(self, part: str, topic: str = "") -> int:
        """How much there is in a stream of the partition."""
        return int(
            await self.engine.store.command("XLEN", getattr(partition_keys(topic or self.topic, 0), part))
        )

    async def dead_bodies(self) -> Counter[str]:
        """The bodies of all dead letters."""
        letters = [letter async for letter in self.client.dead_letters(self.topic)]
        bodies = await self.client.bodies(self.dead, [letter.body for letter in letters])
        return Counter((body or b"lost").decode() for body in bodies)

    async def stored_bodies(self) -> int:
        """How many bodies the store has."""
        keys = await self.engine.store.keys_like(f"kl:bodies:{self.topic}*")
        return sum([int(await self.engine.store.command("HLEN", key)) for key in keys])

    async def clean_up(self) -> None:
        """The keyspace is in order, and nothing is left of the topics."""
        for name in sorted({self.topic, self.dead} & set(await self.engine.topics()), reverse=True):
            assert await check_topic(self.engine, name) == []
            await self.client.delete_topic(name)
        await until(self.has_no_bodies)

    async def has_no_bodies(self) -> bool:
        return await self.stored_bodies() == 0


Act = Callable[[Scene], Awaitable[object]]


class Play(NamedTuple):
    """What is done before the worker gets the order to kill, what then, its end, and what holds then."""

    before: Act
    act: Act
    ended: Callable[[Scene], Awaitable[bool]]
    after: Act
    first: str  # the call that its steps are counted from
    steps: str
    fewest: int  # steps, whatever goes together


async def nothing(_: Scene) -> None:
    """Nothing."""


async def make_letters(scene: Scene) -> None:
    await scene.publish("s")
    await scene.bury_all()


async def look_at_letters(scene: Scene) -> None:
    assert await scene.dead_bodies() == BODIES


async def is_redriven(scene: Scene) -> bool:
    return (
        await scene.length("log", scene.dead) == 0
        and await scene.length("log") == COUNT
        and await scene.is_quiet()
    )


async def look_at_redriven(scene: Scene) -> None:
    assert await scene.take("s", COUNT) == BODIES
    await until(scene.has_no_bodies)
    assert (await scene.client.describe_topic(scene.topic)).messages == 0


async def has_no_letters(scene: Scene) -> bool:
    return (
        await scene.length("log", scene.dead) == 0 and await scene.is_quiet() and await scene.has_no_bodies()
    )


async def two_subscriptions(scene: Scene) -> None:
    await scene.publish("s", "other")
    await scene.take("other", 2)


async def is_purged(scene: Scene) -> bool:
    return (
        await scene.length("log") == COUNT - 2 == await scene.stored_bodies()
        and await scene.is_quiet()
        and not await scene.engine.store.command("HGET", f"kl:topic:{scene.topic}", "purge")
    )


async def look_at_the_others(scene: Scene) -> None:
    """Who has not settled them gets what is left, with bodies, and nothing that it had."""
    assert (await scene.client.describe_subscription(scene.topic, "s")).backlog == 0
    left = await scene.take("other", COUNT - 2)
    assert len(left) == COUNT - 2
    assert left <= BODIES


async def retain(scene: Scene) -> None:
    """One has settled all of them, and one some; they stay for an hour."""
    await scene.publish("s", "other", retention=3_600.0)
    await scene.take("s", COUNT)
    await scene.take("other", 2)


PLAYS = {
    "hand-off": Play(
        lambda scene: scene.publish("s"),
        Scene.fail_all,
        Scene.is_handed_off,
        look_at_letters,
        "subscription/nack",
        f"subscription/(nack|bury)|partition/receive|topic/create|{OF_OUTBOX}",
        4,
    ),
    "redrive": Play(
        make_letters,
        lambda scene: scene.client.redrive(scene.topic),
        is_redriven,
        look_at_redriven,
        "withdraw",
        f"withdraw|partition/receive|{OF_OUTBOX}",
        3,
    ),
    "purge of dead letters": Play(
        make_letters,
        lambda scene: scene.client.purge_dead_letters(scene.topic),
        has_no_letters,
        nothing,
        "withdraw",
        f"withdraw|{OF_BODIES}",
        3,
    ),
    "purge": Play(
        two_subscriptions,
        lambda scene: scene.client.purge(scene.topic, "s"),
        is_purged,
        look_at_the_others,
        "topic/purge",
        f"(topic|message)/purge|{OF_BODIES}",
        3,
    ),
    "retention trim": Play(
        retain,
        lambda scene: scene.client.change_topic(scene.topic, retention=0.05),
        is_purged,
        look_at_the_others,
        "partition/configure",
        f"partition/(configure|trim)|{OF_BODIES}",
        3,
    ),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that writes each answer's data to disk before it gives it."""
    with Server(data_dir=tmp_path / "data", appendfsync="always") as server:
        yield server


async def ended(play: Play, scene: Scene, is_dead: Callable[[], bool]) -> bool:
    """Wait until it has ended, or somebody is dead; answers whether it has."""
    while not is_dead():
        with suppress(BrokerError):
            if await play.ended(scene):
                return not is_dead()
        await asyncio.sleep(POLL)
    return False


async def keep_trying(act: Act, scene: Scene) -> None:
    """What an operator, or an application, does whose call has failed."""
    while True:
        with suppress(BrokerError):
            await act(scene)
            return
        await asyncio.sleep(POLL)


async def one_kill(
    play: Play, scene: Scene, server: Server, victim: str, step: int, patch: pytest.MonkeyPatch
) -> bool:
    """Act until the victim is killed at a step, bring it back, and act again; answers whether nobody was."""
    broker = scene.broker
    await play.before(scene)
    broker.stop_worker()
    pid = server.pid if victim == "server" else 0
    order = {"victim": pid, "step": step, "first": play.first, "steps": play.steps}
    patch.setenv("KILL_AT_STEP", json.dumps(order))
    broker.start_worker()
    patch.delenv("KILL_AT_STEP")
    process = broker.workers[0].process
    assert process is not None
    acting = asyncio.ensure_future(keep_trying(play.act, scene))
    through = await ended(
        play, scene, lambda: process.poll() is not None if victim == "worker" else not server.running
    )
    # Whoever lives sees what has become of the other one, and then makes way for one that kills nobody.
    if victim == "worker":
        broker.kill_worker()
    elif not server.running:
        server.start()
    if victim == "server":
        broker.stop_worker()
        if not server.running:
            server.start()
    broker.start_worker()
    await scene.engine.close()
    scene.engine = Engine.connect(server.url)  # without connections to a server that is gone
    again = acting if through else asyncio.ensure_future(keep_trying(play.act, scene))
    await until(lambda: play.ended(scene))
    for task in (acting, again):
        task.cancel()
    await asyncio.gather(acting, again, return_exceptions=True)
    await play.after(scene)
    return through


@pytest.mark.parametrize("victim", ["worker", "server"])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_kill_at_any_step_neither_loses_nor_doubles(
    name: str, victim: str, server: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = PLAYS[name]
    with RunningBroker(server, partition_lease=2.0, session=2.0) as broker:
        async with AsyncClient(broker.url, timeout=SOON) as client:
            for step in itertools.count(1):
                scene = Scene(broker, client, Engine.connect(server.url), f"{topic}-{step}")
                through = await one_kill(play, scene, server, victim, step, monkeypatch)
                await scene.clean_up()
                await scene.engine.close()
                if through:
                    break
    assert step > play.fewest, "steps"
