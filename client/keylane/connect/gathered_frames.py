"""One frame for several requests: PUBLISHES and ACKS, or what they are where there is only one."""

from keylane import wire


def terms_of(request: wire.Publish) -> tuple[str, str, int, int]:
    """What publishes of one frame have in common."""
    return request.topic, request.durability, request.timeout_ms, request.incarnation


def frame_of_publishes(parts: list[tuple[wire.Publish, list[str]]], last: int) -> bytes:
    """Return the frame for publishes of which the last one has this sequence."""
    if len(parts) == 1:
        return wire.frame(parts[0][0], last, body=wire.pack(parts[0][1]))
    requests = [request for request, _ in parts]
    first = requests[0]
    several = wire.Publishes(
        first.topic,
        [request.partition for request in requests],
        [len(flat) // 3 for _, flat in parts],
        [request.producer for request in requests],
        [request.number for request in requests],
        [request.oldest for request in requests],
        [place for place, request in enumerate(requests) if request.named],
        [place for place, request in enumerate(requests) if request.again],
        first.durability,
        first.timeout_ms,
        first.incarnation,
    )
    return wire.frame(
        several, last - len(parts) + 1, body=wire.pack([text for _, flat in parts for text in flat])
    )


def frame_of_acks(parts: list[tuple[wire.Ack, list[str | int]]], last: int) -> bytes:
    """Return the frame for acks of which the last one has this sequence."""
    if len(parts) == 1:
        return wire.frame(parts[0][0], last, body=wire.pack(parts[0][1]))
    several = wire.Acks(
        [request.stream for request, _ in parts],
        [request.partition for request, _ in parts],
        [len(flat) // 4 for _, flat in parts],
        [request.bodies for request, _ in parts],
    )
    return wire.frame(
        several, last - len(parts) + 1, body=wire.pack([value for _, flat in parts for value in flat])
    )
