"""The keyspace checker sees what is wrong: each kind of damage, done by hand to a sound topic, is named."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.story import Story, part, receipts

Damage = Callable[[Story], Awaitable[object]]


def command(*words: str) -> Damage:
    """A command by hand; `LOG`, `META`, `SUB` and `SUB:x` stand for the keys of the story."""

    async def damage(story: Story) -> None:
        await story.engine.store.command(*(_key(story, word) for word in words))

    return damage


def _key(story: Story, word: str) -> str:
    keys = story.keys
    names = {"LEASE": keys.lease, "LOG": keys.log, "META": keys.meta, "SUBS": keys.subs}
    if word.startswith("SUB:") or word == "SUB":
        return story.sub().sub + word[3:]
    return names.get(word, word.replace("EPOCH", str(story.lease.epoch)))


DAMAGES: dict[str, tuple[str, Damage]] = {
    "a message is gone that is leased": (
        "entry 1 is owed and not in the log",
        command("XDEL", "LOG", "EPOCH-1"),
    ),
    "a message is gone that waits": ("entry 2 is owed and not in the log", command("XDEL", "LOG", "EPOCH-2")),
    "a message is gone that is fresh": (
        "entry 6 is owed and not in the log",
        command("XDEL", "LOG", "EPOCH-6"),
    ),
    "the count of entries went back": (
        "is in the log, but the last one given was 5",
        command("HSET", "META", "last", "5"),
    ),
    "an entry is under the wrong ledger": (
        "in the log under ledger EPOCH, not 9000000000000",
        command("HSET", "META", "ledgers", "EPOCH:1 9000000000000:6", "epoch", "9000000000000"),
    ),
    "the ledger in use is not the newest": (
        "the ledger in use is 5:1, and the newest of all is EPOCH:1",
        command("HSET", "META", "ledger", "5:1"),
    ),
    "the ledgers are out of order": (
        "ledgers are out of order",
        command("HSET", "META", "ledgers", "EPOCH:3 EPOCH:1"),
    ),
    "a lease never ends": ("its lease, 'w1 EPOCH', never ends", command("PERSIST", "LEASE")),
    "a lease is of another epoch": (
        "its lease, 'w1 7', is not of the newest epoch EPOCH",
        command("SET", "LEASE", "w1 7", "PX", "60000"),
    ),
    "a cursor is too far": ("its cursor 9 is beyond the last entry 6", command("HSET", "SUBS", "s", "9")),
    "a cursor is behind what is leased": (
        "is leased or waiting beyond the cursor 1",
        command("HSET", "SUBS", "s", "1"),
    ),
    "a deadline is missing": (
        "leased lanes and deadlines differ: [('c', '=a')]",
        command("ZREM", "SUB:deadlines:c", "=a"),
    ),
    "a deadline is left over": (
        "leased lanes and deadlines differ: [('c', '=z')]",
        command("ZADD", "SUB:deadlines:c", "5", "=z"),
    ),
    "an earliest deadline is too late": (
        "a lease of 'c' ends before its deadlines are looked at",
        command("ZADD", "SUB:deadlines", "99999999999999", "c"),
    ),
    "somebody is remembered who has no session": (
        "charged has consumers without a session: ['z']",
        command("HSET", "SUB:charged", "z", "5"),
    ),
    "a run is not in its index": ("runs and their index differ", command("ZREM", "SUB:runs", "#5")),
    "a run is not named after its first entry": (
        "a run is named after its first entry",
        command("HSET", "SUB:lanes", "#5", "c|30000|0|0|5:4-5"),
    ),
    "a run has two tokens": (
        "a run is leased as a whole, with one token",
        command("HSET", "SUB:lanes", "#5", "c|30000|0|0|5:5 6:7"),
    ),
    "a run lies among another one": (
        "run '#7' begins at 7, and run '#5' goes on up to 9",
        command("HSET", "SUB:lanes", "#5", "c|30000|0|0|5:5 5:9", "#7", "c|30000|0|0|5:7"),
    ),
    "a waiting lane is not listed": ("waiting lanes and ready differ", command("DEL", "SUB:ready")),
    "a lane is listed that does not wait": (
        "waiting lanes and ready differ",
        command("ZADD", "SUB:ready", "0", "c\x00000000000000005\x00=z"),
    ),
    "a lane counts wrong": (
        "it counts 7 waiting, and 1 are",
        command("HSET", "SUB:lanes", "=b", "|30000|7|5|"),
    ),
    "a record counts what is not beyond it": (
        "it counts 2 leased beyond its record, and 0 are",
        command("HSET", "SUB:lanes", "=a", "c|30000|0|0|+2 5:1 5:3"),
    ),
    "a record does not count what is beyond it": (
        "it counts 0 leased beyond its record, and 1 are",
        command("ZADD", "SUB:beyond", "0", "=a\x00000000000000006:5"),
    ),
    "what is beyond a record comes before what that lists": (
        "its ranges are out of order",
        command("ZADD", "SUB:beyond", "0", "=a\x00000000000000002:5"),
    ),
    "a lane has messages beyond a record that is not there": (
        "lane '=y' has messages leased beyond its record, and no record",
        command("ZADD", "SUB:beyond", "0", "=y\x00000000000000003:5"),
    ),
    "a lane has messages waiting and no record": (
        "lane '=y' has messages waiting and no record",
        command("ZADD", "SUB:queue", "0", "=y\x00000000000000003"),
    ),
    "a lane is leased to nobody": (
        "its consumer is '' and 2 are leased",
        command("HSET", "SUB:lanes", "=a", "|30000|0|0|5:1 5:3"),
    ),
    "leased is not a prefix": (
        "leased is not a prefix: 4 is leased and 2 waits",
        command("HSET", "SUB:lanes", "=b", "c|30000|1|5|5:4"),
    ),
    "a message is in two lanes": (
        "entry 1 is in lane",
        command("HSET", "SUB:lanes", "=b", "c|30000|1|5|5:1"),
    ),
    "a lane holds another key's message": (
        "it holds entry 4, whose key is 'c'",
        command("HSET", "SUB:lanes", "=a", "c|30000|0|0|5:4"),
    ),
    "a token was never given": (
        "it has a token that was never given",
        command("HSET", "SUB:lanes", "=a", "c|30000|0|0|99999999999999:1 99999999999999:3"),
    ),
    "a consumer has no session": (
        "lanes are leased to consumers without a session: ['c']",
        command("ZREM", "SUB:consumers", "c"),
    ),
    "a lane has no place in the mode": (
        "has no place in mode shared",
        command("HSET", "SUB", "mode", "shared"),
    ),
    "a retry count is left over": (
        "entry 6 has a retry count and is not unsettled",
        command("HSET", "SUB:retries", "6", "1"),
    ),
    "a retry count is no count": ("entry 2 has the retry count 0", command("HSET", "SUB:retries", "2", "0")),
    "a key belongs to nothing": ("belongs to nothing", command("SET", "SUB:old", "x")),
    "a subscription's key is left over": (
        "belongs to nothing",
        lambda story: story.engine.store.command("SET", story.keys.subscription_prefix + "gone:lanes", "x"),
    ),
    "an entry is owed by nobody": (
        "entry 1 is in the log and owed to nobody",
        command("HDEL", "SUB:lanes", "=a"),
    ),
    "a partition has lost its meta": ("has no meta hash", command("DEL", "META")),
}


@pytest.fixture
async def engine(server_url: str) -> AsyncIterator[Engine]:
    engine = Engine.connect(server_url)
    yield engine
    await engine.close()


async def _sound_topic(engine: Engine, topic: str) -> Story:
    """Lanes leased, waiting and held, a run, a retry count, a fresh message: something in every key."""
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "b", "a", "c", "")
    fetched = await story.fetch()
    [b] = [delivery.receipt for delivery in fetched if delivery.receipt.lane == "=b"]
    await story.nack(part(b, 2), delay_ms=3_600_000)
    await story.publish("d")
    assert len(receipts(fetched)) == 5
    return story


@pytest.mark.slow
@pytest.mark.parametrize("small", [2_000, -1], ids=["at once", "in pages"])
@pytest.mark.parametrize("label", DAMAGES)
async def test_the_checker_sees_that(
    engine: Engine, topic: str, label: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_broker.inspect.snapshot._SMALL", small)
    monkeypatch.setattr("keylane_broker.inspect.snapshot._PAGE", 2)
    story = await _sound_topic(engine, topic)
    assert await check_topic(engine, topic) == []
    expected, damage = DAMAGES[label]
    await damage(story)
    problems = await check_topic(engine, topic)
    expected = expected.replace("EPOCH", str(story.lease.epoch))
    assert any(expected in problem for problem in problems), problems


READER_DAMAGES = {
    "a second reader has a session": (
        "these have a session who have not claimed it: ['r2']",
        command("ZADD", "SUB:consumers", "5", "r2"),
    ),
    "something is leased": (
        "lane '=' has no place in mode cursor",
        command("HSET", "SUB:lanes", "=", "r1|30000|0|0|5:2"),
    ),
    "a message is gone that is to be read": (
        "entry 4 is owed and not in the log",
        command("XDEL", "LOG", "EPOCH-4"),
    ),
    "a message stays that was read": (
        "entry 3 is in the log and owed to nobody",
        command("HSET", "SUBS", "s", "3"),
    ),
}


@pytest.mark.parametrize("label", READER_DAMAGES)
async def test_where_it_is_read_by_position_the_checker_sees_that(
    engine: Engine, topic: str, label: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="cursor", consumers=())
    await story.publish("a", "b", "a", "c", "")
    await engine.claim(topic, "s", "r1", 60_000)
    await engine.commit(topic, "s", "r1", 0, 3)
    assert await check_topic(engine, topic) == []
    expected, damage = READER_DAMAGES[label]
    await damage(story)
    problems = await check_topic(engine, topic)
    expected = expected.replace("EPOCH", str(story.lease.epoch))
    assert any(expected in problem for problem in problems), problems


async def test_the_checker_is_content_while_a_sweep_is_due(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a")
    await story.drop()
    assert await check_topic(engine, topic) == []
