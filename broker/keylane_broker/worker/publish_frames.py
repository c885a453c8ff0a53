"""What PUBLISH frames ask for: their messages and the numbers of these, checked before anything is done."""

from typing import Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import InvalidArgument
from keylane_broker.engine.addressing import take_out_addresses
from keylane_broker.engine.checks import check_abouts, check_dues, check_extras, check_flat, check_int
from keylane_broker.engine.values import NumberedFrame
from keylane_broker.store.durability import replicas
from keylane_broker.worker.frame_parts import check_parts

_TEXTS = Annotated[list[str], Meta(max_length=wire.MAX_BATCH * 3)]  # bounded before memory is set aside


def messages_of(request: wire.Publish, body: memoryview) -> list[str]:
    """Return the messages of a PUBLISH, if they can be published."""
    flat: list[str] = wire.unpack(body, _TEXTS)
    check_flat(flat)
    check_abouts(flat)
    take_out_addresses(flat)
    replicas(request.durability)
    if not 0 < request.timeout_ms <= 60_000:
        raise InvalidArgument(f"timeout_ms is {request.timeout_ms}: use 1 to 60000")
    if request.due_ms is not None:
        check_dues(flat, request.due_ms)
    check_extras(flat, request.extras)
    return flat


def publishes_in(several: wire.Publishes, sequence: int) -> list[wire.Publish]:
    """Return the PUBLISH frames that one frame stands for, without what they bring."""
    columns = (several.partitions, several.sizes, several.producers, several.numbers, several.oldest)
    check_parts(sequence, "partitions, sizes, producers, numbers and oldest", *columns)
    named, again = set(several.named), set(several.again)
    return [
        wire.Publish(
            several.topic,
            partition,
            several.durability,
            several.timeout_ms,
            place in again,
            incarnation=several.incarnation,
            producer=producer,
            number=number,
            oldest=oldest,
            named=place in named,
        )
        for place, (partition, _, producer, number, oldest) in enumerate(zip(*columns, strict=True))
    ]


def numbers_of(request: wire.Publish, flat: list[str]) -> NumberedFrame | None:
    """Return the numbers of the messages of a PUBLISH, if they have any."""
    if not request.producer:
        return None
    if len(request.producer) > wire.MAX_PRODUCER:
        raise InvalidArgument(f"a producer's name has {len(request.producer)} characters; use up to 64")
    if request.due_ms is not None:
        raise InvalidArgument("messages for later have no numbers: leave `producer` out")
    check_int("number", request.number, 1, wire.MAX_NUMBER)
    check_int("oldest", request.oldest, 1, request.number)
    return NumberedFrame(request.producer, request.number, request.oldest, len(flat) // 3, request.named)
