"""What scripts answer, or the error that the first word of an answer stands for."""

from typing import Any

from keylane.errors import Fenced, InvalidArgument, SubscriptionNotFound, TopicNotFound, TopicReplaced
from keylane_broker.engine.values import Lease


def checked(
    answer: list[Any],
    topic: str,
    subscription: str = "",
    *,
    lease: Lease | None = None,
    partition: int | None = None,
) -> list[Any]:
    """Return a script's answer, or raise the error that its first word stands for."""
    match answer[0]:
        case "FENCED" if lease is not None:
            raise Fenced(
                f"{lease.worker} no longer holds partition {lease.partition} of {topic!r} "
                f"in epoch {lease.epoch}"
            )
        case "NO_TOPIC" if partition is None:
            raise TopicNotFound(f"no topic {topic!r}")
        case "NO_TOPIC":
            raise TopicNotFound(f"no topic {topic!r} with a partition {partition}")
        case "NO_SUBSCRIPTION":
            raise SubscriptionNotFound(f"no subscription {subscription!r} on {topic!r}")
        case "OTHER_TOPIC":
            raise replaced(topic)
        case "OTHER_SUBSCRIPTION":
            raise SubscriptionNotFound(made_anew(topic, subscription))
        case "BY_POSITION":
            raise InvalidArgument(by_position(topic, subscription))
        case "BY_LEASE":
            raise InvalidArgument(
                f"subscription {subscription!r} of {topic!r} has mode {answer[1]}: only one of mode cursor "
                "is read by position"
            )
    return answer


def by_position(topic: str, subscription: str) -> str:
    """Say why a subscription of mode cursor has no consumers."""
    return (
        f"subscription {subscription!r} of {topic!r} is read by position (mode cursor, as Spark does) and "
        "has no consumers: use another subscription"
    )


def check_incarnation(topic: str, meant: int, there: int) -> None:
    """Raise TopicReplaced if a topic is not the one that was meant; 0 is any."""
    if meant not in (0, there):
        raise replaced(topic)


def replaced(topic: str) -> TopicReplaced:
    """Return the error for a topic that is not the one that was meant."""
    return TopicReplaced(
        f"topic {topic!r} was deleted and recreated: subscribe again, and look up "
        "its partition count before publishing"
    )


def made_anew(topic: str, subscription: str) -> str:
    """Say why a subscription is not the one that was meant."""
    return f"subscription {subscription!r} of {topic!r} was deleted and recreated: subscribe again"
