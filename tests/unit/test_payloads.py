"""Opening payload stores: which URL is for whom, and what an error shows."""

import os
import threading
import time
from pathlib import Path

import pytest

from keylane import ksuid
from keylane.errors import InvalidArgument, InvalidName, Unavailable
from keylane.payloads import bodies, open_store, public
from keylane.payloads.files import FileStore
from keylane.payloads.redis import RedisStore
from keylane.wire import InfoReply

LIFETIME = 3_600.0


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379/3",
        "rediss://bob:secret@localhost:6379/0",
        "unix:///run/redis.sock",
        "redis+cluster://127.0.0.1:7000",
        "redis+sentinel://a:26379,b/mymaster",
        "redis+sentinel://bob:s%40fe@a/mymaster",
    ],
)
async def test_urls_of_redis_open_a_redis_store_and_connect_to_nothing_yet(url: str) -> None:
    store = open_store(url, lifetime=LIFETIME)
    assert isinstance(store, RedisStore)
    await store.close()


async def test_other_urls_open_what_fsspec_knows(tmp_path: Path) -> None:
    for url in ("memory://", "memory://bodies", f"file://{tmp_path}", f"local://{tmp_path}"):
        store = open_store(url, lifetime=LIFETIME)
        assert isinstance(store, FileStore)
        await store.close()


async def test_the_library_of_a_store_is_imported_while_the_event_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importers = []

    async def greeting() -> InfoReply:
        return InfoReply(1, "worker", "", [], 0, "", 0, 10_000, 10_000, 1)

    async def owed(topic: str, before: str) -> set[str]:
        return set()

    monkeypatch.setattr(bodies, "import_store", lambda _: importers.append(threading.current_thread()))
    store = bodies.Bodies("memory://beside", greeting, owed, time.time)
    [name] = ksuid.take(1)
    await store.put("orders", [(name, b"42")])
    assert await store.get("orders", [name]) == [b"42"]
    await store.close()
    [importer] = importers
    assert importer is not threading.current_thread()


def test_an_unknown_scheme_is_an_invalid_argument_that_says_what_to_use() -> None:
    with pytest.raises(InvalidArgument, match=r"nosuch://there.*use redis://.*file:///.*pip install"):
        open_store("nosuch://there", lifetime=LIFETIME)


def test_a_missing_package_is_an_invalid_argument_that_says_what_to_install() -> None:
    with pytest.raises(InvalidArgument, match=r"s3://bucket/bodies needs .*pip install s3fs"):
        open_store("s3://bucket/bodies", lifetime=LIFETIME)


def test_a_text_that_is_no_url_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="is not the URL of a payload store"):
        open_store("/var/bodies", lifetime=LIFETIME)


def test_a_lifetime_must_be_more_than_nothing() -> None:
    with pytest.raises(InvalidArgument, match="lifetime"):
        open_store("memory://", lifetime=0)


def test_a_path_that_fsspec_would_expand_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="in its path"):
        open_store("memory://a*b", lifetime=LIFETIME)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("redis://:secret@db:6379/0", "redis://db:6379/0"),
        ("redis://bob:se@cr/et@db/0?ssl_password=secret", "redis://db/0"),
        ("redis+sentinel://bob:secret@a:1,b:2/main", "redis+sentinel://a:1,b:2/main"),
        ("file:///home/me@work/bodies", "file:///home/me@work/bodies"),
        ("simplecache::ftp://bob:secret@host/x", "simplecache::ftp://host/x"),
        ("bob:secret@host", "host"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    assert public(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret/more@db:6379/0",
        "redis://:secret@db:port/0",
        "redis+cluster://:secret/more@db:6379",
        "redis+sentinel://bob:secret@a:port/main",
        "redis+sentinel://bob:secret@/main",
    ],
)
def test_a_redis_url_that_cannot_be_read_never_shows_its_password(url: str) -> None:
    with pytest.raises(InvalidArgument, match="no address that can be read") as raised:
        open_store(url, lifetime=LIFETIME)
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__


async def test_a_server_that_is_not_there_is_a_named_retriable_error_without_the_password() -> None:
    store = RedisStore("redis://:secret@127.0.0.1:1/0", lifetime=LIFETIME, patience=0.1)
    with pytest.raises(Unavailable, match=r"payload store redis://127.0.0.1:1/0 cannot be reached") as raised:
        await store.get("orders", ksuid.take(1))
    assert raised.value.retriable
    assert "secret" not in str(raised.value)
    await store.close()


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1/main", "redis+cluster://127.0.0.1:1"])
async def test_no_sentinel_and_no_cluster_are_the_same_error(url: str) -> None:
    store = RedisStore(url, lifetime=LIFETIME, patience=0.1)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await store.put("orders", [(ksuid.take(1)[0], b"42")])
    await store.close()


@pytest.mark.parametrize("topic", ["../orders", "a/b", "", ".hidden"])
async def test_a_topic_cannot_leave_the_folder_of_a_file_store(topic: str, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/bodies", lifetime=LIFETIME)
    with pytest.raises(InvalidName):
        await store.put(topic, [(ksuid.take(1)[0], b"42")])
    assert os.listdir(tmp_path) == []
    await store.close()
