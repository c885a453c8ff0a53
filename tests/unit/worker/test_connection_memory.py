"""Who gives way when too much waits for clients to read."""

import asyncio
from dataclasses import dataclass, field

from keylane import wire
from keylane_broker.config import Settings
from keylane_broker.counters import Counters
from keylane_broker.worker.connection_memory import ConnectionMemory, MemoryUser
from tests.support.virtual_time import in_virtual_time


@dataclass(eq=False)
class Reader:
    """A connection for which something waits."""

    peer: str
    unsent: int
    read_at: float
    waiting: int = 0
    aborted: bool = field(default=False)

    def measure(self) -> None:
        pass

    def regulate(self) -> None:
        pass

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


@in_virtual_time
async def test_who_reads_is_not_closed_for_those_who_do_not() -> None:
    await asyncio.sleep(100)
    now = asyncio.get_running_loop().time()
    busy = Reader("reads what it has just been sent", 4_000, now)
    stalled = [Reader(f"has not read for {age} s", 1_000, now - age) for age in (5, 90, 20, 40)]
    trickling = Reader("reads a byte a second", 3_900, now - 1)
    readers: set[MemoryUser] = {busy, trickling, *stalled}
    memory = ConnectionMemory(Settings.model_validate({"max_unsent_bytes": 10_000}), readers, Counters())
    memory.unsent = sum(reader.unsent for reader in readers)
    memory.close_slow_readers()
    assert [one.aborted for one in stalled] == [False, True, False, True]
    assert not busy.aborted
    assert not trickling.aborted
    assert memory.unsent == 9_900
    memory.max_unsent = 5_000
    memory.close_slow_readers()
    assert [one.aborted for one in (*stalled, trickling, busy)] == [True, True, True, True, True, False]
