"""The calls for the ordinary case, made one at a time: None or False where it is not one."""

from collections.abc import Sequence

from keylane_broker.engine.checks import flat_messages
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import checked_receipts
from keylane_broker.engine.turns import Turn, WholeAck
from keylane_broker.engine.values import (
    Capacity,
    Fetched,
    Lease,
    NumberedFrame,
    Outgoing,
    PublishResult,
    Receipt,
)


async def turn(
    engine: Engine,
    lease: Lease,
    subscription: str,
    messages: Sequence[Outgoing],
    consumers: Sequence[Capacity],
    receipts: Sequence[Receipt] = (),
    others: int = 0,
    frames: Sequence[NumberedFrame] = (),
) -> Turn | None:
    """Settle, publish and lease."""
    acks, names = await _acks(engine, lease, receipts)
    flat = flat_messages(messages)
    script, keys, arguments = engine.turn_call(
        lease, subscription, flat, consumers, others=others, acks=acks, names=names, frames=frames
    )
    answer = await engine.store.run(script, keys, *arguments)
    assert answer[0] in ("OK", "SLOW")
    return engine.take_turn(lease, flat, consumers, answer) if answer[0] == "OK" else None


async def lease_fresh(
    engine: Engine,
    lease: Lease,
    subscription: str,
    messages: Sequence[Outgoing],
    published: PublishResult,
    consumers: Sequence[Capacity],
    others: int = 0,
) -> Fetched | None:
    """Lease what a turn of another subscription has published."""
    flat = flat_messages(messages)
    script, keys, arguments = engine.lease_call(lease, subscription, published.first, flat, consumers, others)
    answer = await engine.store.run(script, keys, *arguments)
    assert answer[0] in ("OK", "SLOW")
    if answer[0] != "OK":
        return None
    return engine.take_leased(lease, flat, published, consumers, answer, answer[1])


async def ack_whole(
    engine: Engine, lease: Lease, subscription: str, receipts: Sequence[Receipt], consumer: str = ""
) -> bool:
    """Settle."""
    acks, names = await _acks(engine, lease, receipts, consumer)
    script, keys, arguments = engine.ack_whole_call(lease, subscription, acks, names)
    answer = await engine.store.run(script, keys, *arguments)
    assert answer[0] in ("OK", "SLOW")
    return bool(answer[0] == "OK")


async def _acks(
    engine: Engine, lease: Lease, receipts: Sequence[Receipt], consumer: str = ""
) -> tuple[list[WholeAck], str]:
    if not receipts:
        return [], ""
    checked = checked_receipts(lease, receipts)
    return [WholeAck(consumer, checked)], await engine.names_of_bodies(lease, checked.ranges)
