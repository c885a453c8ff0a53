"""Scripts that are called often are functions that a server keeps, wherever it can."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keylane.errors import BrokerError
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Lease, Outgoing
from keylane_broker.store.connection import SharedConnection
from keylane_broker.store.scripts import Scripts
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import single_server
from tests.support.waiting import until

OFTEN = "subscription/fetch"  # the name of a script that is called often
COUNT = """-- count: how often note() is called.
local LIMIT = 5
local noted, last = 0
local notes = {}
local function note()
  noted = noted + 1
  notes[#notes + 1] = last or 'first'
  last = 'again'
  return noted
end
"""
SCRIPT = """-- fetch: what is left of an earlier call would be seen here.
-- Needs  count
local key = KEYS[1]
local function with_key(text)
  return key .. text
end
if ARGV[1] == 'early' then
  note()
  return { 'OK', 'early' }
elseif ARGV[1] == 'error' then
  note()
  redis.call('LPUSH', key)
end
return { 'OK', note(), notes[1], #notes, with_key(ARGV[1]), LIMIT }
"""
SOURCES = {"lib/prelude": "", "lib/count": COUNT, OFTEN: SCRIPT}


@asynccontextmanager
async def store_on(url: str, sources: dict[str, str] = SOURCES) -> AsyncIterator[Store]:
    """A store with scripts of its own."""
    store = Store.connect(url, Scripts(sources))
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def server(server_binary: Path) -> AsyncIterator[Server]:
    """A server that a test may spoil."""
    with single_server(binary=server_binary, appendonly=True) as server:
        yield server


async def calls(store: Store) -> dict[str, int]:
    """How often the server was told to run a script, by command."""
    stats = await store.command("INFO", "commandstats")
    found = {name: stats.get(f"cmdstat_{name}", {"calls": 0}) for name in ("fcall", "evalsha", "eval")}
    return {name: int(its["calls"]) for name, its in found.items()}


async def test_a_function_knows_nothing_of_earlier_calls(server: Server) -> None:
    async with store_on(server.url) as store:
        expected = ["OK", 1, "first", 1, "kx", 5]
        for _ in range(3):
            assert await store.run(OFTEN, ["k"], "x") == expected
        assert await store.run(OFTEN, ["k"], "early") == ["OK", "early"]
        assert await store.run(OFTEN, ["k"], "x") == expected
        with pytest.raises(Exception, match=r"[Ww]rong number of arg"):
            await store.run(OFTEN, ["k"], "error")
        assert await store.run(OFTEN, ["k"], "x") == expected
        assert await calls(store) == {"fcall": 7, "evalsha": 0, "eval": 0}


async def test_versions_of_a_script_live_side_by_side(server: Server) -> None:
    newer = {**SOURCES, "lib/count": COUNT.replace("LIMIT = 5", "LIMIT = 6")}
    async with store_on(server.url) as old, store_on(server.url, newer) as new:
        for _ in range(2):
            assert (await old.run(OFTEN, ["k"], "x"))[-1] == 5
            assert (await new.run(OFTEN, ["k"], "x"))[-1] == 6
        assert len(await old.command("FUNCTION", "LIST")) == 2


async def test_libraries_of_many_old_versions_go(server: Server) -> None:
    for version in range(30):
        sources = {**SOURCES, "lib/count": COUNT.replace("LIMIT = 5", f"LIMIT = {version}")}
        async with store_on(server.url, sources) as store:
            assert (await store.run(OFTEN, ["k"], "x"))[-1] == version
            assert len(await store.command("FUNCTION", "LIST")) <= 8
    async with store_on(server.url, sources) as store, store_on(server.url) as older:
        for _ in range(3):
            assert (await store.run(OFTEN, ["k"], "x"))[-1] == 29
            assert (await older.run(OFTEN, ["k"], "x"))[-1] == 5
        await store.command(
            "FUNCTION", "LOAD", "#!lua name=other\nredis.register_function('f', function() end)"
        )
    assert ask(server.port, "FUNCTION", "LIST", "LIBRARYNAME", "other")


async def test_functions_that_vanish_are_loaded_again(server: Server) -> None:
    async with store_on(server.url) as store:
        for _ in range(3):
            assert (await store.run(OFTEN, ["k"], "x"))[:2] == ["OK", 1]
            await store.command("FUNCTION", "FLUSH")
        assert (await store.run_durably("fsync", 1_000, OFTEN, ["k"], "x"))[:2] == ["OK", 1]
        assert len(await store.command("FUNCTION", "LIST")) == 1
        assert await calls(store) == {"fcall": 4, "evalsha": 0, "eval": 3}


@pytest.mark.parametrize("rule", ["-fcall", "-function|load", "-function"])
async def test_where_functions_are_forbidden_scripts_are_called_by_their_digest(
    server: Server, rule: str
) -> None:
    ask(server.port, "ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", rule)
    async with store_on(server.url.replace("redis://", "redis://u:p@")) as store:
        for _ in range(3):
            assert (await store.run(OFTEN, ["k"], "x"))[:2] == ["OK", 1]
        assert (await store.run_durably("fsync", 1_000, OFTEN, ["k"], "x"))[:2] == ["OK", 1]
        found = await calls(store)
        assert found["evalsha"] + found["eval"] == 4
        assert found["evalsha"] >= 2


async def test_a_full_memory_keeps_functions_out_and_scripts_go_on(server: Server) -> None:
    ask(server.port, "CONFIG", "SET", "maxmemory", "1")
    async with store_on(server.url) as store:
        for _ in range(3):
            assert (await store.run(OFTEN, ["k"], "x"))[:2] == ["OK", 1]
        assert await calls(store) == {"fcall": 1, "evalsha": 2, "eval": 1}


@pytest.mark.parametrize("rule", ["+@all", "-fcall"])
async def test_a_posted_call_is_not_carried_out_where_the_server_does_not_know_it_and_the_next_is(
    server: Server, rule: str
) -> None:
    ask(server.port, "ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", rule)
    async with store_on(server.url.replace("redis://", "redis://u:p@")) as store:
        connection = await _connection_of(store)
        await store.command("FUNCTION", "FLUSH")
        answers: list[Any] = []

        async def post() -> Any:
            store.post(connection, (OFTEN, ["k"], ["x"]), answers.append)
            await until(lambda: answers)
            return answers.pop()

        assert await post() is None
        until_known = [await post() for _ in range(2)]  # where functions are forbidden, by its digest
        assert until_known[-1][:2] == ["OK", 1]
        assert sum(answer is None for answer in until_known) == (0 if rule == "+@all" else 1)


async def test_what_is_called_in_order_is_done_in_order_from_the_first_call_on(server: Server) -> None:
    """A call by a name that the server does not know is made again, and others would go before it."""
    sources = {
        **SOURCES,
        OFTEN: "-- fetch: \nredis.call('RPUSH', KEYS[1], ARGV[1])\nreturn {'OK'}",
        "test/seldom": "-- seldom: \nredis.call('RPUSH', KEYS[1], ARGV[1])\nreturn {'OK'}",
    }
    async with store_on(server.url, sources) as store:
        await store.run("test/seldom", ["before"], "x")
        names = [OFTEN, "test/seldom"]
        await store.run_all([(names[place % 2], ["k"], [place]) for place in range(10)])
        assert await store.command("LRANGE", "k", 0, -1) == [str(place) for place in range(10)]


async def _connection_of(store: Store) -> SharedConnection:
    server = await store.server_of("k")
    return await store.connections.open(server)


async def _work(engine: Engine, lease: Lease) -> None:
    await engine.publish(lease, [Outgoing("key", "uid", "1")])
    [found] = (await engine.fetch(lease, "s", [Capacity("c", 10)])).deliveries
    await engine.extend(lease, "s", [found.receipt], lease_ms=1_000)
    await engine.nack(lease, "s", [found.receipt])
    [found] = (await engine.fetch(lease, "s", [Capacity("c", 10)])).deliveries
    await engine.ack(lease, "s", [found.receipt])


async def test_what_is_done_to_each_message_is_done_by_functions(server: Server) -> None:
    engine = Engine.connect(server.url)
    try:
        for topic in ("first", "second"):
            await engine.create_topic(topic)
            await engine.create_subscription(topic, "s")
            lease = await engine.acquire(topic, 0, "w", 10_000)
            assert lease is not None
            await engine.join(lease, "s", "c", 10_000)
            before = await calls(engine.store)
            await _work(engine, lease)
            after = await calls(engine.store)
        assert {name: after[name] - before[name] for name in after} == {"fcall": 6, "evalsha": 0, "eval": 0}
    finally:
        await engine.close()


async def test_an_error_of_a_script_is_not_taken_for_one_that_is_not_known(server: Server) -> None:
    sources = {**SOURCES, OFTEN: "-- fetch: fails.\nlocal x = nil\nreturn x.y"}
    async with store_on(server.url, sources) as store:
        for _ in range(2):
            with pytest.raises(Exception, match="attempt to index") as raised:
                await store.run(OFTEN, ["k"])
            assert not isinstance(raised.value, BrokerError)
        assert await calls(store) == {"fcall": 2, "evalsha": 0, "eval": 0}
