"""The checker sees what workers left that cannot be right: each kind of damage is named."""

from collections.abc import AsyncIterator

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import TopicSettings, WorkerReport
from keylane_broker.inspect import cluster_checker
from keylane_broker.inspect.cluster_checker import check_cluster
from keylane_broker.inspect.snapshot import take_cluster_snapshot
from loadtest.topology import single_server

MINUTE_MS = 60_000


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """A sound cluster of two workers, on a server of its own."""
    monkeypatch.setattr(cluster_checker, "_PAUSE", 0.0)
    with single_server() as server:
        engine = Engine.connect(server.url)
        await engine.create_topic("orders", TopicSettings(partitions=3))
        for worker in ("w1", "w2"):
            report = WorkerReport(worker, "host:1", "1.0", "serving", 1, 1.5, 0.5, {"orders:0": (1.5, 0.5)})
            await engine.enlist(report, MINUTE_MS)
        await engine.drain("w2", True)
        await engine.lead("w1", MINUTE_MS)
        assert await engine.assign(0, {"orders": ["w1", "", "w2"]})
        yield engine
        await engine.close()


async def test_nothing_is_wrong_with_a_sound_cluster_nor_with_none(engine: Engine) -> None:
    assert await check_cluster(engine) == []
    for worker in ("w1", "w2"):
        await engine.depart(worker)
    assert await engine.assign(1, {"orders": None})
    await engine.delete_topic("orders")
    assert await check_cluster(engine) == []


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("ZADD kl:workers 1 w/1", "kl:workers lists 'w/1', which is no worker's name"),
        ("ZREM kl:workers w1", "kl:worker:w1 is not in kl:workers"),
        ("PERSIST kl:worker:w1", "kl:worker:w1 never ends"),
        ("HSET kl:worker:w1 state asleep", "kl:worker:w1 has the state 'asleep'"),
        ("HSET kl:worker:w1 load [", "kl:worker:w1 cannot be read"),
        ("HSET kl:worker:w1 messages many", "kl:worker:w1 cannot be read"),
        ("PERSIST kl:controller", "kl:controller is 'w1' forever"),
        ("SET kl:controller -w1 PX 60000", "kl:controller is '-w1', which is no worker's name"),
        ("HSET kl:owners # x", "kl:owners has the version 'x'"),
        ("HDEL kl:owners #", "kl:owners has no version"),
        ("HSET kl:owners orders w1", "kl:owners names 1 owners for 'orders', which has 3 partitions"),
        ("HSET kl:owners bills w1", "kl:owners names 'bills', which is no topic"),
        ("HSET kl:owners orders w1|w1|w?1", "names 'w?1' for 'orders', which is no worker's name"),
    ],
)
async def test_each_kind_of_damage_is_named(engine: Engine, damage: str, found: str) -> None:
    await engine.store.command(*(word.replace("|", " ") for word in damage.split()))
    [problem] = await check_cluster(engine)
    assert found in problem


async def test_the_owners_of_a_topic_that_is_half_made_or_half_deleted_may_be_any(engine: Engine) -> None:
    for state in ("creating", "deleting"):
        await engine.store.command("HSET", "kl:topic:orders", "state", state, "partitions", "7")
        assert await check_cluster(engine) == []


async def test_what_the_controller_puts_right_meanwhile_is_no_problem(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.create_topic("bills")
    await engine.assign(1, {"bills": ["w1"], "gone": ["w1"]})

    async def put_right(store: object) -> object:
        found = await take_cluster_snapshot(engine.store)
        await engine.assign(2, {"gone": None})
        return found

    monkeypatch.setattr(cluster_checker, "take_cluster_snapshot", put_right)
    assert await check_cluster(engine) == []
