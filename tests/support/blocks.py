"""Messages as a worker sends them, without a worker."""

import time
from collections.abc import Sequence

from keylane import wire
from keylane.consume.block import Block

LEASE = 30.0  # seconds


def block(
    messages: Sequence[tuple[int, str]] | int,
    *,
    token: int = 1,
    partition: int = 0,
    now: float | None = None,
    lease: float = LEASE,
    about: str = "1 1   ",
    settled: list[int] | None = None,
) -> Block:
    """Return messages, entry and key of each, or so many without a key; leased from `now` on."""
    if isinstance(messages, int):
        messages = [(entry, "") for entry in range(1, messages + 1)]
    ranges = [entry for entry, _ in messages for _ in range(2)]
    entries = [entry for entry, _ in messages]
    if entries == list(range(entries[0], entries[0] + len(entries))):
        ranges = [entries[0], entries[-1]]
    texts = [text for entry, key in messages for text in (key, f"uid-{entry}", about)]
    body = memoryview(wire.pack([ranges, texts, [], []]))
    data = wire.Data(1, partition, token, round(lease * 1000), "7:1", settled=settled)
    frame = wire.Frame(wire.Type.DATA, 0, 0, memoryview(b""), body)
    return Block(frame, data, time.monotonic() if now is None else now)
