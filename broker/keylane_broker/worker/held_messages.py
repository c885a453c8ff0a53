"""What a consumer holds already, for one that comes back: what is left of it, and the frames to tell it."""

from collections.abc import Iterable

from msgspec.structs import replace

from keylane import wire
from keylane_broker.engine.values import Delivery, Message


def without(held: Iterable[Delivery], ended: Iterable[tuple[int, int, int]]) -> list[Delivery]:
    """Return what is still held after these leases (token, first, last) have ended."""
    gone = {(token, entry) for token, first, last in ended for entry in range(first, last + 1)}
    if not gone:
        return list(held)
    return [
        replace(
            delivery,
            messages=[item for item in delivery.messages if (delivery.receipt.token, item.entry) not in gone],
        )
        for delivery in held
    ]


def count_messages(deliveries: Iterable[Delivery]) -> int:
    """Return how many messages there are in all."""
    return sum(len(delivery.messages) for delivery in deliveries)


def held_frames(
    held: Iterable[Delivery], stream: int, partition: int
) -> list[tuple[wire.Data, list[int], list[str], list[int]]]:
    """Return what a consumer holds already as frames, one for each token and deadline.

    In the order of tokens, which only grow within a lane: so each lane is in order.
    """
    groups: dict[tuple[int, int], list[Message]] = {}
    for delivery in sorted(held, key=lambda delivery: delivery.receipt.first):
        groups.setdefault((delivery.receipt.token, delivery.deadline_ms), []).extend(delivery.messages)
    frames = []
    for (token, deadline_ms), messages in sorted(groups.items(), key=lambda item: item[0]):
        ledgers: dict[str, int] = {}
        for message in messages:
            ledgers.setdefault(message.id.partition("-")[0], message.entry)
        data = wire.Data(
            stream,
            partition,
            token,
            deadline_ms,
            " ".join(f"{ledger}:{first}" for ledger, first in ledgers.items()),
            held=True,
        )
        ranges = [message.entry for message in messages for _ in range(2)]
        texts = [text for message in messages for text in (message.key, message.uid, message.about)]
        retries = [part for item in messages if item.retries for part in (item.entry, item.retries)]
        if messages:
            frames.append((data, ranges, texts, retries))
    return frames
