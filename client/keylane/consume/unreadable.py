"""Messages whose text about them nobody can read: nacked, later each time; the application never has them."""

import logging
from collections.abc import Callable

from keylane import wire
from keylane.consume.block import BUFFERED, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import SettleKind

_IDS = 1_000  # to remember
_DELAY_MS = 1_000  # after which one comes again, at first
_log = logging.getLogger("keylane.client")


class Unreadable:
    """The unreadable messages of one consumer; `submit` settles in the background."""

    def __init__(
        self, topic: str, leases: Leases, submit: Callable[[SettleKind, list[Span]], object]
    ) -> None:
        self._topic = topic
        self._leases = leases
        self._submit = submit
        self._told: dict[str, None] = {}  # ids: each is logged once

    def nack(self, block: Block) -> None:
        """Nack the messages of a block that cannot be read, charged."""
        for index, fault in block.faults.items():
            if block.states[index] != BUFFERED:
                continue
            if (id := block.id(index)) not in self._told:
                self._told[id] = None
                if len(self._told) > _IDS:
                    del self._told[next(iter(self._told))]
                _log.warning("message %s of %r cannot be read, so it is nacked: %s", id, self._topic, fault)
            if block.gone is not None:  # at most once: it is settled already
                self._leases.stale(block, index)
                self._leases.credit(block.partition, 1)
                continue
            delay_ms = _DELAY_MS << min(block.retries.get(block.entries[index], 0), 8)
            kind = SettleKind(int(wire.Type.NACK), delay_ms, reason=f"nobody can read it: {fault}")
            self._submit(kind, [(block, index, index + 1)])
