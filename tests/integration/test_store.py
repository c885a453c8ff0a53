"""The store on servers that die, hang, move, refuse and come back; scripts of its own stand in for ours."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.crc import key_slot

from keylane.errors import DurabilityNotReached, InvalidArgument, Unavailable
from keylane.wire import lines
from keylane_broker.errors import ServerError
from keylane_broker.store.connection import Address, SharedConnection
from keylane_broker.store.scripts import Scripts
from keylane_broker.store.server_info import fsync_confirmation
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import Cluster, replica_pair, single_server, three_node_cluster
from tests.support.faults import stopped
from tests.support.waiting import until

SCRIPTS = Scripts(
    {
        "lib/prelude": "",
        "test/echo": "return ARGV",
        "test/write": "redis.call('SET', KEYS[1], ARGV[1]) return {'OK'}",
        "test/loop": "while true do end",
        "partition/acquire_lease": "redis.call('SET', KEYS[1], ARGV[1]) return {'OK'}",
        "partition/renew_leases": "redis.call('SET', KEYS[1], ARGV[1]) return {'OK'}",
        "partition/delete": "redis.call('SET', KEYS[1], ARGV[1]) return {'OK'}",
    }
)
PATIENCE = 1.5  # seconds


@asynccontextmanager
async def store_on(url: str, patience: float = 10.0) -> AsyncIterator[Store]:
    """A store for the length of a test."""
    store = Store.connect(url, SCRIPTS, patience=patience)
    try:
        yield store
    finally:
        await store.close()


async def until_it_works(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call while it answers that Redis is away."""
    with anyio.fail_after(60):
        while True:
            try:
                return await call()
            except Unavailable:
                await anyio.sleep(0.02)


def connections(server: Server) -> int:
    """How many connections a server has, but for the one that asks."""
    return ask(server.port, "CLIENT", "LIST", "TYPE", "normal").count(" addr=") - 1


# Arguments


@pytest.mark.parametrize("bad", ["\ud800", None, True], ids=["lone surrogate", "None", "True"])
async def test_an_argument_that_cannot_be_sent_is_named_and_no_other_call_gets_its_answer(
    server_url: str, bad: Any
) -> None:
    async with store_on(server_url) as store:
        assert await store.run("test/echo", ["k"], "before") == ["before"]
        with pytest.raises(InvalidArgument, match="EVALSHA"):
            await store.run("test/echo", ["k"], bad)
        with pytest.raises(InvalidArgument, match="EVALSHA"):
            await store.run_durably("replicated", 10, "test/echo", ["k"], bad)
        for number in range(3):
            assert await store.run("test/echo", ["k"], number) == [str(number)]


async def test_a_key_that_cannot_be_sent_is_named(cluster_url: str, server_url: str) -> None:
    for url in (server_url, cluster_url.replace("redis://", "redis+cluster://")):
        async with store_on(url) as store:
            with pytest.raises(InvalidArgument):
                await store.run("test/echo", ["\ud800"])
            with pytest.raises(InvalidArgument):
                await store.command("GET", "\ud800")


# Clusters


@pytest.fixture
def cluster(server_binary: Path) -> Iterator[Cluster]:
    """A cluster that a test may break."""
    config = {"cluster-require-full-coverage": "no", "appendfsync": "always"}
    with three_node_cluster(binary=server_binary, appendonly=True, config=config) as cluster:
        yield cluster


def key_in(first: int, last: int) -> str:
    """A key whose slot is in a range."""
    return next(f"key-{number}" for number in range(10**6) if first <= key_slot(b"key-%d" % number) <= last)


def cluster_store(url: str, patience: float = 10.0) -> AbstractAsyncContextManager[Store]:
    """A store on a cluster, of which it is told one node."""
    return store_on(url.replace("redis://", "redis+cluster://"), patience)


@pytest.mark.slow
async def test_a_node_that_dies_and_comes_back_serves_the_same_store_again(cluster: Cluster) -> None:
    key, other = key_in(10923, 16383), key_in(0, 5460)
    async with cluster_store(cluster.url) as store:
        await store.run("test/write", [key], 1)
        cluster.nodes[2].kill()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await store.run("test/write", [key], 2)
            assert await store.run("test/write", [other], 2) == ["OK"]
        cluster.nodes[2].start()
        assert await until_it_works(lambda: store.run("test/write", [key], 3)) == ["OK"]
        assert await until_it_works(lambda: store.command("GET", key)) == "3"


async def test_the_slots_of_a_node_that_died_are_found_where_they_are_now(cluster: Cluster) -> None:
    heir, other, dead = cluster.nodes
    key = key_in(10923, 16383)
    async with cluster_store(cluster.url) as store:
        await store.run("test/write", [key], 1)
        name = ask(dead.port, "CLUSTER", "MYID")
        dead.kill()
        for node in (heir, other):
            with suppress(ServerError):  # the first tells the second whom to forget
                ask(node.port, "CLUSTER", "FORGET", name)
        ask(heir.port, "CLUSTER", "ADDSLOTSRANGE", "10923", "16383")
        assert await until_it_works(lambda: store.run("test/write", [key], 2)) == ["OK"]
        with pytest.raises(DurabilityNotReached, match="0 of 1"):
            await store.run_durably("replicated", 10, "test/write", [key], 3)
        assert ask(heir.port, "GET", key) == "3"


async def test_a_slot_that_moves_is_followed(cluster: Cluster) -> None:
    old, new, _ = cluster.nodes
    key = key_in(0, 5460)
    slot = str(key_slot(key.encode()))
    async with cluster_store(cluster.url) as store:
        await store.run("test/write", [key], 1)
        ask(old.port, "DEL", key)
        for node in (new, old):
            ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ask(new.port, "CLUSTER", "MYID"))
        for number in range(2):
            assert await store.run("test/write", [key], number) == ["OK"]
        assert ask(new.port, "GET", key) == "1"


def give(slot: str, source: Server, target: Server, *others: Server) -> None:
    """Let a slot be another node's, without what is in it; the others may be asked at once where it is."""
    for node in (target, source, *others):
        ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ask(target.port, "CLUSTER", "MYID"))


def losses(store: Store) -> list[str]:
    """The leases that a store will say it has lost."""
    lost: list[str] = []
    store.on_lost = lost.extend
    return lost


@pytest.mark.parametrize("durability", ["memory", "fsync"])
@pytest.mark.parametrize("learned", ["by this call", "by another call", "by itself"])
async def test_what_is_done_under_a_lease_goes_nowhere_but_where_it_was_taken(
    cluster: Cluster, learned: str, durability: str
) -> None:
    old, new, other = cluster.nodes
    tag = key_in(0, 5460)
    key, slot = f"{{{tag}}}:lease", str(key_slot(tag.encode()))
    async with cluster_store(cluster.url) as store:

        async def write(value: str) -> list[Any]:
            return await store.run_durably(durability, 1_000, "test/write", [key], value)

        with pytest.raises(Unavailable, match="lease is to be taken"):
            await write("0")
        assert store.route(key) is None
        await store.run("partition/acquire_lease", [key], "w 1")
        assert await write("1") == ["OK"]
        assert store.route(key) is not None
        lost = losses(store)
        ask(old.port, "DEL", key)
        give(slot, old, new, other)
        if learned == "by another call":
            await store.run("test/write", [f"{{{tag}}}"], "2")
        elif learned == "by itself":
            await store.redis.nodes_manager.initialize()
        assert learned == "by this call" or store.route(key) is None
        for _ in range(2):
            with pytest.raises(Unavailable):
                await write("3")
            assert store.route(key) is None
        assert ask(new.port, "EXISTS", key) == "0"
        assert lost == [key]
        await store.run("partition/acquire_lease", [key], "w 4")
        assert store.route(key) is not None
        assert await write("5") == ["OK"]
        assert ask(new.port, "GET", key) == "5"


async def test_what_needs_no_lease_follows_a_slot_that_has_moved(cluster: Cluster) -> None:
    old, new, _ = cluster.nodes
    tag = key_in(0, 5460)
    key, slot = f"{{{tag}}}:lease", str(key_slot(tag.encode()))
    async with cluster_store(cluster.url) as store:
        for number, script in enumerate(("partition/acquire_lease", "partition/delete")):
            await store.run(script, [key], "1")
            source, target = (old, new) if number == 0 else (new, old)
            ask(source.port, "DEL", key)
            give(slot, source, target)
            assert await store.run(script, [key], "2") == ["OK"]


@pytest.mark.slow
async def test_a_renewal_waits_for_no_other_answers(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            await store.run("partition/acquire_lease", ["k:lease"], "w 1")
            await store.run("partition/renew_leases", ["k:lease"], "1")
            await store.run("test/write", ["large"], "x" * 1_000_000)
            shared = store.connections.get(await store.server_of("large"))
            assert shared is not None
            burst = [shared.call("GET", "large") for _ in range(300)]
            await store.run("partition/renew_leases", ["k:lease"], "2")
            assert not burst[-1].done()
            await asyncio.gather(*burst)


async def test_a_lease_taken_at_a_server_that_was_promoted_meanwhile_is_lost(server_binary: Path) -> None:
    with replica_pair(binary=server_binary) as pair:
        async with store_on(pair.master.url) as store:
            await store.run("partition/acquire_lease", ["k:lease"], "w 1")
            lost = losses(store)
            await store.homes.recognise(60.0)
            assert lost == []
            ask(pair.master.port, "REPLICAOF", "127.0.0.1", str(pair.replica.port))
            ask(pair.master.port, "REPLICAOF", "NO", "ONE")
            await store.homes.recognise(60.0)
            assert lost == ["k:lease"]
            with pytest.raises(Unavailable, match="lease is to be taken"):
                await store.run("test/write", ["k:lease"], "2")


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["memory", "fsync"])
async def test_a_node_that_hangs_holds_up_no_other(cluster: Cluster, durability: str) -> None:
    keys = [key_in(10923, 16383), key_in(0, 5460)]
    async with cluster_store(cluster.url, PATIENCE) as store:
        for key in keys:
            await store.run_durably(durability, 2_000, "test/write", [key], 1)
        with stopped(cluster.nodes[2]):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await store.run_durably(durability, 1, "test/write", keys[:1], 2)
                assert await store.run("test/write", keys[1:], 2) == ["OK"]
        assert await until_it_works(lambda: store.run("test/write", keys[:1], 3)) == ["OK"]


# A server that hangs


@pytest.mark.slow
async def test_a_server_that_hangs_is_unavailable_until_it_goes_on(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url, PATIENCE) as store:
            await store.run("test/write", ["k"], 1)
            with stopped(server), anyio.fail_after(60):
                for _ in range(2):  # first on the connection that there is, then on a new one
                    with pytest.raises(Unavailable):
                        await store.run("test/write", ["k"], 2)
                    with pytest.raises(Unavailable):
                        await store.command("GET", "k")
                    with pytest.raises(Unavailable):
                        await store.run_durably("replicated", 1, "test/write", ["k"], 2)
            assert await until_it_works(lambda: store.run("test/write", ["k"], 3)) == ["OK"]
            with pytest.raises(DurabilityNotReached):
                await store.run_durably("replicated", 1, "test/write", ["k"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_all_who_wait_for_a_connection_fail_together(server_binary: Path, scheme: str) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url.replace("redis", scheme, 1), PATIENCE) as store:
            with stopped(server), anyio.fail_after(10 * PATIENCE):  # one after the other would take 30
                calls = (store.run("test/echo", ["k"]) for _ in range(30))
                answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {Unavailable}


async def test_who_gives_up_waiting_for_a_connection_leaves_it_to_the_others(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            with stopped(server):
                patient = asyncio.create_task(store.run("test/echo", ["k"], "here"))
                with anyio.move_on_after(0.05) as scope:
                    await store.run("test/echo", ["k"])
                assert scope.cancelled_caught
            assert await patient == ["here"]
            assert connections(server) == 1


async def test_a_store_that_is_closed_while_it_connects_says_so(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            with stopped(server):
                waiting = asyncio.create_task(store.run("test/echo", ["k"]))
                await anyio.sleep(0.05)
                await store.close()
                with pytest.raises(Unavailable):
                    await waiting
            await until(lambda: connections(server) == 0)
            assert await store.run("test/echo", ["k"], "again") == ["again"]


# Transactions


async def test_a_transaction_is_answered_in_full_or_fails_as_a_whole(
    server_url: str, cluster_url: str
) -> None:
    for url in (server_url, cluster_url.replace("redis://", "redis+cluster://")):
        async with store_on(url) as store:
            await store.atomically([("DEL", "{t}h", "{t}s"), ("HSET", "{t}h", "a", 1), ("SET", "{t}s", "x")])
            assert await store.atomically([("HGETALL", "{t}h"), ("GET", "{t}s")]) == [["a", "1"], "x"]
            with pytest.raises(Exception, match="WRONGTYPE"):
                await store.atomically([("GET", "{t}s"), ("GET", "{t}h")])
            with pytest.raises(Exception, match="NONSENSE"):
                await store.atomically([("SET", "{t}s", "y"), ("NONSENSE", "{t}s")])
            assert await store.atomically([("GET", "{t}s")]) == ["x"]


async def test_a_transaction_follows_a_slot_that_has_moved(cluster: Cluster) -> None:
    old, new, _ = cluster.nodes
    key = key_in(0, 5460)
    slot = str(key_slot(key.encode()))
    async with cluster_store(cluster.url) as store:
        await store.atomically([("SET", key, "1")])
        ask(old.port, "DEL", key)
        for node in (new, old):
            ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ask(new.port, "CLUSTER", "MYID"))
        assert await store.atomically([("SET", key, "2"), ("GET", key)]) == ["OK", "2"]
        assert ask(new.port, "GET", key) == "2"


# Answers that are handed on unread


@pytest.mark.slow
async def test_an_answer_comes_as_the_server_sends_it_however_large(
    server_url: str, cluster_url: str
) -> None:
    for url in (server_url, cluster_url.replace("redis://", "redis+cluster://")):
        async with store_on(url) as store:
            keys = [f"unread-{number}" for number in range(20)]
            for number, key in enumerate(keys):
                await store.read_all([("DEL", key)])
                fields = ["a", "$16\r\n" * number * 1_000, "b", "é"]
                await store.read_all([("XADD", key, f"1-{entry}", *fields) for entry in range(1, 30)])
            sent = await asyncio.gather(*(store.read_raw("XRANGE", key, "-", "+") for key in keys))
            read = await store.read_all([("XRANGE", key, "-", "+") for key in keys])
            assert [lines.parse(answer) for answer in sent] == read
            assert sent == [lines.pack(answer) for answer in read]
            assert [lines.count(answer) for answer in sent] == [29] * 20
            with pytest.raises(Exception, match="wrong number of arguments"):
                await store.read_raw("XRANGE", keys[0])
            assert await store.read_raw("XRANGE", keys[0], "-", "-") == b"*0\r\n"
            await store.read_all([("DEL", key) for key in keys])


async def test_an_unread_answer_follows_a_slot_that_has_moved(cluster: Cluster) -> None:
    old, new, _ = cluster.nodes
    key = key_in(0, 5460)
    slot = str(key_slot(key.encode()))
    async with cluster_store(cluster.url) as store:
        assert await store.read_raw("XRANGE", key, "-", "+") == b"*0\r\n"
        for node in (new, old):
            ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ask(new.port, "CLUSTER", "MYID"))
        ask(new.port, "XADD", key, "1-1", "a", "b")
        for _ in range(2):
            assert lines.parse(await store.read_raw("XRANGE", key, "-", "+")) == [["1-1", ["a", "b"]]]


async def test_whoever_gives_up_on_an_unread_answer_spoils_no_other(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            await store.read_all([("XADD", "k", "1-1", "a", "b")])
            await store.read_raw("XRANGE", "k", "-", "+")
            with stopped(server):
                waiting = asyncio.create_task(store.read_raw("XRANGE", "k", "-", "+"))
                await until(lambda: bool(store.connections._lent))
                waiting.cancel()
                await asyncio.wait([waiting])
            answers = await asyncio.gather(*(store.read_raw("XRANGE", "k", "-", "+") for _ in range(5)))
            assert {lines.count(answer) for answer in answers} == {1}


@pytest.mark.parametrize("error", ["LOADING Redis is loading", "NOAUTH required", "MASTERDOWN is down"])
async def test_a_server_that_refuses_says_so_instead_of_an_unread_answer(error: str) -> None:
    async with server_that_says(error) as (url, _), store_on(url) as store:
        with anyio.fail_after(8), pytest.raises(Unavailable):  # and not when patience ends
            await store.read_raw("GET", "k")


@pytest.mark.parametrize("size", [1, 7, 22, 23, 24, 1_000])
async def test_an_answer_ends_at_its_mark_in_whatever_pieces_it_comes(size: int) -> None:
    class Sent(list[bytes]):
        transport: Any

        def write(self, data: bytes) -> None:
            self.append(data)

        def abort(self) -> None:
            self.clear()

    sent = Sent()
    sent.transport = sent
    link = SharedConnection(Address("", None), sent, 60.0)  # type: ignore[arg-type]
    for answer in (b"*0\r\n", b"*1\r\n$3\r\na\r\n\r\n" + b"$16\r\n" * 50):
        calling = asyncio.create_task(link.read_raw("XRANGE", "k"))
        await until(lambda: bool(sent))
        mark = b"$16" + b"".join(sent).rpartition(b"$16")[2]
        whole = answer + mark
        for at in range(0, len(whole), size):
            assert not calling.done()
            link.data_received(whole[at : at + size])
        assert await calling == answer
        sent.clear()
    link.close()


# Fsync


@pytest.mark.slow
async def test_the_first_fsync_publishes_of_all_at_once_succeed(cluster: Cluster) -> None:
    for url in (cluster.url.replace("redis://", "redis+cluster://"), cluster.nodes[0].url):
        async with store_on(url) as store:
            calls = (
                store.run_durably("fsync", 5_000, "test/write", [f"{{{key_in(0, 5460)}}}{n}"], n)
                for n in range(200)
            )
            assert await asyncio.gather(*calls) == [["OK"]] * 200


async def test_fsync_is_asked_of_the_server_that_holds_the_key(cluster: Cluster) -> None:
    without = cluster.nodes[1]
    ask(without.port, "CONFIG", "SET", "appendonly", "no")
    async with cluster_store(cluster.url) as store:
        for first, last in ((0, 5460), (5461, 10922), (10923, 16383)):
            key = key_in(first, last)
            if first == 5461:
                with pytest.raises(DurabilityNotReached, match="appendonly") as caught:
                    await store.run_durably("fsync", 5_000, "test/write", [key], 1)
                assert not caught.value.stored
                assert ask(without.port, "EXISTS", key) == "0"
            else:
                assert await store.run_durably("fsync", 5_000, "test/write", [key], 1) == ["OK"]


@pytest.mark.parametrize("policy", ["always", "everysec"])
async def test_fsync_is_confirmed_by_waitaof_and_a_change_of_the_settings_is_noticed(
    server_binary: Path, policy: Any
) -> None:
    with Server(binary=server_binary, appendfsync=policy) as server:
        async with store_on(server.url) as store:

            async def write() -> bool | None:
                """What is known of the message when it was not confirmed: was it stored?"""
                try:
                    await store.run_durably("fsync", 5_000, "test/write", ["k"], 1)
                except DurabilityNotReached as error:
                    return error.stored
                return None

            if fsync_confirmation(ask(server.port, "INFO"), None) != "wait":
                # An old server: only its policy tells, and where it does not, nothing is stored.
                assert await write() is (None if policy == "always" else False)
                return
            assert await write() is None
            assert "cmdstat_waitaof:" in ask(server.port, "INFO", "commandstats")
            await store.command("CONFIG", "SET", "appendonly", "no")
            assert [await write(), await write(), await write()] == [True, False, False]
            await store.command("CONFIG", "SET", "appendonly", "yes")
            assert [await write(), await write()] == [None, None]


@pytest.mark.parametrize(
    ("info", "policy", "answer"),
    [
        ("redis_version:7.0.15|aof_enabled:1", "always", "always"),
        ("redis_version:7.0.15|aof_enabled:1", "everysec", None),
        ("redis_version:7.0.15|aof_enabled:1", None, None),
        ("redis_version:7.0.15|aof_enabled:0", "always", None),
        ("redis_version:7.2.0|aof_enabled:1", "always", "wait"),
        ("redis_version:10.0.0|aof_enabled:1", None, "wait"),
        ("redis_version:8.2.1|aof_enabled:0", "everysec", None),
        ("redis_version:7.2.4|server_name:valkey|valkey_version:8.0.1|aof_enabled:1", None, "wait"),
        ("redis_version:7.0.0|server_name:valkey|valkey_version:7.2.5|aof_enabled:1", None, "wait"),
        ("redis_version:7.2.4|server_name:valkey|valkey_version:9.1.2|aof_enabled:0", "always", None),
        ("", "always", None),
    ],
)
def test_how_a_server_confirms_fsync(info: str, policy: str | None, answer: str | None) -> None:
    text = "# Server\r\n" + "".join(line + "\r\n" for line in info.split("|"))
    assert fsync_confirmation(text, policy) == answer


# Connections for commands that wait


async def test_a_wait_that_is_cancelled_takes_its_connection_with_it(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            await store.run("test/echo", ["k"])
            with anyio.move_on_after(0.05):
                await store.run_durably("replicated", 60_000, "test/write", ["k"], 1)
            await until(lambda: connections(server) == 1)
            with anyio.fail_after(5), pytest.raises(DurabilityNotReached, match="0 of 1"):
                await store.run_durably("replicated", 1, "test/write", ["k"], 2)


async def test_a_server_that_dies_during_the_wait_is_unavailable_since_nobody_knows_what_it_kept(
    server_binary: Path,
) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            waiting = asyncio.create_task(store.run_durably("replicated", 60_000, "test/write", ["k"], 1))
            await until(lambda: "blocked_clients:1" in ask(server.port, "INFO", "clients"))
            server.kill()
            with pytest.raises(Unavailable):
                await waiting


@pytest.mark.slow
async def test_of_many_connections_that_waited_a_few_are_kept(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            for _ in range(2):
                calls = (store.run_durably("replicated", 50, "test/write", ["k"], 1) for _ in range(30))
                answers = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(answer) for answer in answers} == {DurabilityNotReached}
                await until(lambda: connections(server) <= 9)  # and the one that all share
        await until(lambda: connections(server) == 0)


# Errors


@asynccontextmanager
async def server_that_says(error: str) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers every command with one error; and a count of its connections."""
    count = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count[0] += 1
        while data := await reader.read(65536):
            for word in data.split(b"\r\n"):
                if word in (b"CLIENT", b"EVALSHA", b"GET", b"INFO"):
                    writer.write(b"+OK\r\n" if word == b"CLIENT" else f"-{error}\r\n".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", count


@pytest.mark.parametrize(
    ("error", "said", "connections"),
    [
        ("CLUSTERDOWN The cluster is down", "down", 1),
        ("MASTERDOWN SharedConnection with MASTER is down", "MASTER", 3),
        ("BUSY Redis is busy running a script.", "BUSY", 1),
        ("MISCONF Redis is configured to save RDB snapshots", "MISCONF", 1),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS", 1),
        ("LOADING Redis is loading the dataset in memory", "loading", 1),
        ("READONLY You can't write against a read only replica.", "read only", 3),
        ("NOAUTH Authentication required.", "credentials", 1),
        ("WRONGPASS invalid username-password pair", "credentials", 1),
        ("NOPERM No permissions to run 'evalsha'", "credentials", 1),
    ],
)
async def test_a_server_that_refuses_is_unavailable_and_keeps_its_connection_unless_its_role_changed(
    error: str, said: str, connections: int
) -> None:
    async with server_that_says(error) as (url, count), store_on(url) as store:
        for _ in range(3):
            with pytest.raises(Unavailable, match=said):
                await store.run("test/echo", ["k"])
        assert count == [connections]
        with pytest.raises(Unavailable, match=said):
            await store.command("GET", "k")


async def test_a_server_that_is_busy_with_a_script_is_unavailable(server_binary: Path) -> None:
    with single_server(binary=server_binary, config={"busy-reply-threshold": "1"}) as server:
        async with store_on(server.url) as busy, store_on(server.url) as store:
            await store.run("test/echo", ["k"])
            looping = asyncio.create_task(busy.run("test/loop", ["k"]))

            async def says_busy() -> bool:
                try:
                    await store.run("test/echo", ["k"])
                except Unavailable as error:
                    return "BUSY" in str(error)
                return False

            with anyio.fail_after(60):
                while not await says_busy():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            ask(server.port, "SCRIPT", "KILL")
            with pytest.raises(Exception, match="killed"):
                await looping
            assert await store.run("test/echo", ["k"], "again") == ["again"]


async def test_too_few_replicas_and_wrong_credentials_are_named(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            await store.command("CONFIG", "SET", "min-replicas-to-write", "1")
            with pytest.raises(Unavailable, match="NOREPLICAS"):
                await store.run("test/write", ["k"], 1)
            await store.command("CONFIG", "SET", "min-replicas-to-write", "0")
            assert await store.run("test/write", ["k"], 1) == ["OK"]
            await store.command("CONFIG", "SET", "requirepass", "secret")
        for url in (server.url, server.url.replace("redis://", "redis://:wrong@")):
            async with store_on(url) as store:
                with pytest.raises(Unavailable, match="credentials"):
                    await store.run("test/echo", ["k"])
        async with store_on(server.url.replace("redis://", "redis://:secret@")) as store:
            assert await store.run("test/echo", ["k"], "let in") == ["let in"]


async def test_a_master_that_becomes_a_replica_is_left(server_binary: Path) -> None:
    with replica_pair(binary=server_binary) as pair:
        async with store_on(pair.master.url) as store:
            await store.run("test/write", ["k"], 1)
            await store.run_durably("replicated", 5_000, "test/write", ["k"], 1)
            ask(pair.master.port, "REPLICAOF", "127.0.0.1", str(pair.replica.port))
            with pytest.raises(Unavailable):
                await store.run("test/write", ["k"], 2)
            with pytest.raises(Unavailable):
                await store.run_durably("replicated", 5_000, "test/write", ["k"], 2)
            await until(lambda: connections(pair.master) == 0)


# Event loops


@pytest.mark.slow
def test_a_store_goes_on_in_another_event_loop(server_url: str, cluster_url: str, topic: str) -> None:
    for url in (server_url, cluster_url.replace("redis://", "redis+cluster://")):
        store = Store.connect(url, SCRIPTS)

        async def use(number: int, store: Store = store) -> None:
            calls = (store.run("test/echo", ["k"], number) for _ in range(20))
            assert await asyncio.gather(*calls) == [[str(number)]] * 20
            asked = (store.command("GET", "k") for _ in range(20))
            assert await asyncio.gather(*asked) == [None] * 20
            await store.command("XADD", topic, f"{number + 1}-0", "number", number)
            assert (await store.command("XRANGE", topic, "-", "+"))[number][1] == ["number", str(number)]
            with pytest.raises(DurabilityNotReached):
                await store.run_durably("replicated", 1, "test/write", ["w"], number)

        async def last(use: Callable[[int], Awaitable[None]] = use, store: Store = store) -> None:
            await use(2)
            await store.close()
            await store.close()

        for number in range(2):
            asyncio.run(use(number))
        asyncio.run(last())
        gc.collect()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # true: nobody can close the connection
def test_a_store_whose_event_loop_ended_without_notice_goes_on_in_another(server_url: str) -> None:
    store = Store.connect(server_url, SCRIPTS)
    for number in range(2):
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)
        assert loop.run_until_complete(store.run("test/echo", ["k"], number)) == [str(number)]
        loop.close()
        del loop
        gc.collect()

    async def last() -> None:
        assert await store.run("test/echo", ["k"], "last") == ["last"]
        await store.close()

    asyncio.run(last())
    gc.collect()


# Many calls at once


@pytest.mark.slow
async def test_however_many_calls_come_at_once_none_fails_and_connections_stay_few(
    server_binary: Path,
) -> None:
    with single_server(binary=server_binary) as server:
        async with store_on(server.url) as store:
            before = int(ask(server.port, "INFO", "stats").partition("connections_received:")[2].split()[0])
            calls = [store.command("SADD", "many", n) for n in range(500)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert answers == [1] * 500
            waits = [store.run_durably("replicated", 1, "test/write", [f"k{n}"], n) for n in range(500)]
            outcomes = await asyncio.gather(*waits, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {DurabilityNotReached}
            after = int(ask(server.port, "INFO", "stats").partition("connections_received:")[2].split()[0])
            assert after - before <= 150


@pytest.mark.slow
async def test_a_cluster_takes_any_number_of_calls_at_once_too(cluster_url: str) -> None:
    async with cluster_store(cluster_url) as store:
        calls = [store.command("SET", f"many-{n}", n) for n in range(500)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers == [True] * 500
        for n in range(500):
            await store.command("DEL", f"many-{n}")
