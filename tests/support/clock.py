"""What several test folders share: an engine whose scripts run on a clock that the test moves."""

import asyncio
import re
from functools import cache

from keylane_broker.engine.bodies import count_body_records
from keylane_broker.engine.engine import Engine
from keylane_broker.store.scripts import Scripts, read_sources
from keylane_broker.store.store import Store

CLOCK = "kl:test:clock"


def with_test_clock(sources: dict[str, str]) -> dict[str, str]:
    """The same sources, with the time read from a key (single server only)."""
    body = f"local function clock()\n  return tonumber(redis.call('GET', '{CLOCK}'))\nend"
    prelude, replaced = re.subn(
        r"local function clock\(\)\n.*?\nend", body, sources["lib/prelude"], flags=re.DOTALL
    )
    assert replaced == 1, "the prelude has one clock"
    return {**sources, "lib/prelude": prelude}


async def bodies_are_gone(redis_url: str, topic: str, partitions: int = 1) -> None:
    """Wait until all bodies are deleted of which it was written down that nobody needs them."""
    engine = Engine.connect(redis_url)
    try:
        async with asyncio.timeout(60.0):
            places = [(topic, number) for number in range(partitions)]
            while any(await count_body_records(engine.store, places)):  # noqa: ASYNC110 - Redis does not tell
                await asyncio.sleep(0.02)
    finally:
        await engine.close()


@cache  # that takes longer than many a test
def _timed_scripts() -> Scripts:
    return Scripts(with_test_clock(read_sources()))


class ManualTime:
    """An engine on a clock that stands still until it is moved."""

    back_ms = 0  # how far the clock of Redis was set back

    def __init__(self, url: str, sources: dict[str, str] | None = None) -> None:
        scripts = Scripts(with_test_clock(sources)) if sources else _timed_scripts()
        self.engine = Engine(Store.connect(url, scripts))
        self.now_ms = 1_000_000

    @property
    def clock_ms(self) -> int:
        """What the clock of Redis shows: it may have been set back, while time goes on."""
        return self.now_ms - self.back_ms

    async def start(self) -> None:
        """Set the clock."""
        await self.engine.store.read_all([("SET", CLOCK, str(self.clock_ms))])

    async def advance(self, ms: int) -> None:
        """Move the clock."""
        self.now_ms += ms
        await self.start()

    async def set_back(self, ms: int) -> None:
        """Set the clock of Redis back; for partitions that look before and after, time goes on."""
        self.back_ms += ms
        await self.start()
