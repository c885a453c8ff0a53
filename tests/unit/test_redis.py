"""What the payload store and the broker's store share: URLs of Redis, and what its errors are called."""

import asyncio

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from keylane.errors import BrokerError, Overloaded, Unavailable
from keylane.redis.connection import take_socket
from keylane.redis.errors import error_of, named, passes
from keylane.redis.urls import check_url, open_client


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://localhost", Redis),
        ("rediss://user:pa%40ss@localhost:6380/2", Redis),
        ("unix:///run/redis.sock", Redis),
        ("redis+cluster://a:1,b:2", RedisCluster),
        ("redis+sentinel://:secret@a,b:2/main", Redis),
    ],
)
def test_each_kind_of_url_has_its_client_and_connects_to_nobody_yet(url: str, kind: type) -> None:
    check_url(url)
    assert isinstance(open_client(url, 1.0), kind)


def test_credentials_of_a_sentinel_url_are_the_master_s() -> None:
    pool = open_client("redis+sentinel://user:pa%40ss@a:1,b/main", 1.0).connection_pool
    assert (pool.service_name, pool.connection_kwargs["username"]) == ("main", "user")
    assert pool.connection_kwargs["password"] == "pa@ss"
    assert [one.connection_pool.connection_kwargs["port"] for one in pool.sentinel_manager.sentinels] == [
        1,
        26379,
    ]


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("localhost", "cannot connect to 'localhost': use redis://"),
        ("http://localhost", "cannot connect to"),
        ("redis://localhost/first", "the database is 'first'; it should be a number"),
        ("redis://localhost:many", "Port"),
        ("redis+cluster://a:1,b:many", "'b:many' is not a host and a port"),
        ("redis+sentinel://:1/main", "':1' is not a host and a port"),
    ],
)
def test_a_url_that_cannot_be_right_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_url(url)


@pytest.mark.parametrize(
    ("text", "kind", "ours"),
    [
        ("OOM command not allowed", OutOfMemoryError, Overloaded),
        ("WRONGPASS invalid password", AuthenticationError, Unavailable),
        ("READONLY You can't write", ReadOnlyError, Unavailable),
        ("MOVED 42 host:1", MovedError, Unavailable),
        ("MISCONF Redis is configured to save", ResponseError, Unavailable),
        ("ERR unknown command", ResponseError, None),
    ],
)
def test_what_a_server_answers_is_an_error_of_redis_py_and_then_one_of_ours(
    text: str, kind: type[Exception], ours: type[BrokerError] | None
) -> None:
    error = error_of(text)
    assert type(error) is kind
    found = named(error, "the store")
    assert type(found) is (ours or type(None))
    assert found is None or str(found).startswith("the store ")


def test_only_what_goes_away_by_itself_is_waited_for() -> None:
    assert passes(ConnectionError("refused"))
    assert passes(OSError("no route"))
    assert passes(error_of("BUSY a script runs"))
    assert not passes(error_of("NOAUTH Authentication required"))
    assert not passes(error_of("ERR unknown command"))


class HungUpOn:
    """A connection of redis-py to a server that hangs up while it is greeted, as uvloop tells it."""

    disconnected = False

    async def connect(self) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def disconnect(self, *, nowait: bool) -> None:
        self.disconnected = nowait


async def test_a_server_that_hangs_up_while_it_is_greeted_is_one_that_passes() -> None:
    server = HungUpOn()
    with pytest.raises(ConnectionError, match="lost") as lost:
        await take_socket(server)
    assert passes(lost.value)
    assert server.disconnected


class Greeted:
    """A connection of redis-py to a server that hangs up behind its last word of greeting."""

    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    def __init__(self, port: int) -> None:
        self._port = port

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        await self._reader.read()  # the end has come by the time the stream is taken over


async def test_a_server_that_hangs_up_behind_its_greeting_is_not_waited_for() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        with pytest.raises(ConnectionError, match="closed the connection") as lost:
            await take_socket(Greeted(server.sockets[0].getsockname()[1]))
    assert passes(lost.value)
