"""Behind Sentinel the engine finds the master, and finds the new one after a failover."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from broker.engine import Engine
from broker.results import Outgoing, TopicSettings
from broker.server import ask, free_port
from broker.topology import ReplicaPair, replica_pair
from client.errors import BrokerError, Fenced, Unavailable
from client.wire import pack_about

CONFIG = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor mymaster 127.0.0.1 {master} 1
sentinel down-after-milliseconds mymaster 1000
sentinel failover-timeout mymaster 5000
"""


@pytest.fixture
def pair(server_binary: Path) -> Iterator[ReplicaPair]:
    with replica_pair(binary=server_binary) as servers:
        yield servers


@pytest.fixture
def sentinel_port(pair: ReplicaPair, server_binary: Path, tmp_path: Path) -> Iterator[int]:
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(CONFIG.format(port=port, folder=tmp_path, master=pair.master.port))
    process = subprocess.Popen([server_binary, config, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def _until(port: int, text: str, *command: str) -> None:
    """Wait until Sentinel's answer to a command has a text in it."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if text in ask(port, *command):
                return
        except OSError:
            pass  # it is still starting
        await anyio.sleep(0.02)
    raise AssertionError(f"no {text!r} in the answer to {command}")


@pytest.mark.slow
async def test_the_engine_follows_the_master_through_a_failover(
    pair: ReplicaPair, sentinel_port: int, topic: str
) -> None:
    await _until(sentinel_port, "slaves=1", "INFO", "sentinel")
    engine = Engine.connect(f"redis+sentinel://127.0.0.1:{sentinel_port}/mymaster")
    await engine.create_topic(topic, TopicSettings(retain=True))
    lease = await engine.acquire(topic, 0, "w1", ttl_ms=60_000)
    assert lease is not None
    await engine.publish(lease, [Outgoing("k", "u1", pack_about(1))], durability="replicated")

    assert ask(sentinel_port, "SENTINEL", "FAILOVER", "mymaster") == "OK"
    await _until(sentinel_port, f"address=127.0.0.1:{pair.replica.port}", "INFO", "sentinel")

    # The lease was replicated too; the worker that knows its epoch goes on above it.
    with anyio.fail_after(20):
        while True:
            try:
                held = await engine.acquire(topic, 0, "w1", ttl_ms=60_000, known_epoch=lease.epoch)
                break
            except Unavailable as error:
                assert error.retriable
                await anyio.sleep(0.05)
    assert held is not None
    assert held.epoch > lease.epoch
    with pytest.raises(Fenced):
        await engine.publish(lease, [Outgoing("k", "u2", pack_about(1))])
    result = await engine.publish(held, [Outgoing("k", uid, pack_about(1)) for uid in ("u1", "u2")])
    assert [(answer.id, answer.duplicate) for answer in result.each()] == [("1-1", True), ("2-2", False)]
    assert "role:master" in ask(pair.replica.port, "INFO", "replication")
    await engine.close()


async def test_no_sentinel_is_a_named_error() -> None:
    engine = Engine.connect(f"redis+sentinel://127.0.0.1:{free_port()}/mymaster")
    with pytest.raises(BrokerError) as caught:
        await engine.topics()
    assert caught.value.code == "unavailable"
    await engine.close()
