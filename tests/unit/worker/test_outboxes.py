"""Outboxes that cannot be emptied yet do not keep the others waiting, nor fill the log."""

import asyncio
import logging
from typing import cast

import pytest

from keylane.errors import Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Place
from keylane_broker.worker.outboxes import Outboxes
from keylane_broker.worker.partitions import Partitions
from tests.support.virtual_time import in_virtual_time

STUCK = 40  # partitions, more than are tried at the same time


class _Engine:
    """One whose partitions of the topic "stuck" cannot send what they have."""

    def __init__(self) -> None:
        self.tried: list[Place] = []
        self.sent = asyncio.Event()

    async def empty_outbox(self, topic: str, partition: int) -> set[Place]:
        self.tried.append((topic, partition))
        if topic == "stuck":
            raise Unavailable("its dead-letter topic has no owner yet")
        self.sent.set()
        return set()


@in_virtual_time
async def test_what_cannot_be_sent_yet_does_not_hold_up_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    engine = _Engine()
    outboxes = Outboxes(cast(Engine, engine), cast(Partitions, None), ())
    with caplog.at_level(logging.WARNING, "keylane.broker"):
        running = asyncio.ensure_future(outboxes.run())
        for partition in range(STUCK):
            outboxes.wake("stuck", partition)
        await asyncio.sleep(10)
        assert engine.tried.count(("stuck", 0)) > 5
        for _ in range(5):
            engine.sent.clear()
            outboxes.wake("fine", 0)
            await asyncio.wait_for(engine.sent.wait(), 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not [text for text in caplog.messages if "works again" in text], "it does not"
