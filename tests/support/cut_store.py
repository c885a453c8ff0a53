"""A store of a process that crashes after some of its calls: what it has done is done, and nothing else."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from keylane_broker.store.servers import Argument
from keylane_broker.store.store import Store


class Crash(Exception):
    """The process ends here."""


class CutStore(Store):
    """A store of a process that crashes after some calls, or that is slow at times."""

    left: int | None = None
    chance: random.Random | None = None

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """As ever, until the end."""
        await self._step()
        return await super().run(script, keys, *arguments)

    async def read_all(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """As ever, until the end."""
        await self._step()
        return await super().read_all(commands)

    async def _step(self) -> None:
        if self.chance is not None:
            for _ in range(self.chance.choice((0, 0, 1, 5, 30))):
                await asyncio.sleep(0)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash
