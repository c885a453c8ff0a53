"""Lanes: those that have stopped at a message which has no retry left, and those that move to a consumer."""

from typing import Any, NamedTuple

from keylane.errors import InvalidArgument, MessageLeased, Overloaded
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.codec import rows
from keylane_broker.store.keys import PartitionKeys, subscription_keys

_LISTED = 7  # values of each lane


class Parked(NamedTuple):
    """A lane that has stopped at a message: `waiting` messages, that one included, wait for it to go on."""

    partition: int
    lane: str
    id: str  # <ledger>-<entry>
    since_ms: int
    retries: int
    consumer: str  # who had the message last
    reason: str
    waiting: int

    @property
    def key(self) -> str:
        """The key whose lane it is, "" for none: in key_shared a message, else the whole partition."""
        return self.lane[1:] if self.lane.startswith("=") else ""


class ParkOperations(EngineBase):
    """What operators do with lanes; this needs no partition lease."""

    async def move_key(self, topic: str, subscription: str, partition: int, key: str, consumer: str) -> int:
        """Have a consumer be the next one that gets a free key; returns how many messages of it wait."""
        keys = subscription_keys(topic, partition, subscription)
        answer = await self.store.run("subscription/move_key", keys, "", subscription, f"={key}", consumer)
        whose = f"key {key[:60]!r} of subscription {subscription!r} on {topic!r}"
        match checked(answer, topic, subscription, partition=partition):
            case ["LEASED", holder, *_]:
                raise MessageLeased(
                    f"consumer {holder!r} has messages of {whose}: move it when they are settled"
                )
            case ["UNKNOWN_CONSUMER", *_]:
                raise InvalidArgument(
                    f"no consumer {consumer[:60]!r} is connected to partition {partition} of subscription "
                    f"{subscription!r} on {topic!r}: `keylane subscription describe` lists them"
                )
            case ["NOT_KEY_SHARED", mode, *_]:
                raise InvalidArgument(
                    f"subscription {subscription!r} on {topic!r} has mode {mode}: keys move in key_shared"
                )
            case ["TOO_MANY", *_]:
                raise Overloaded(
                    f"subscription {subscription!r} on {topic!r} has many moved keys that their consumers "
                    "have not got yet: try again later"
                )
        return int(answer[1])

    async def parked(self, topic: str, subscription: str, partitions: int) -> list[Parked]:
        """Return the lanes of a subscription that are parked, longest parked first."""
        found: dict[tuple[int, str], Parked] = {}
        for first in range(0, partitions, STEP):
            places = dict.fromkeys(range(first, min(first + STEP, partitions)), "0")
            while places:
                answers = await self.store.run_all(
                    [
                        (
                            "subscription/list_parked",
                            PartitionKeys.of(topic, number).subscription(subscription),
                            ["", subscription, STEP, position],
                        )
                        for number, position in places.items()
                    ]
                )
                for number, answer in zip(list(places), answers, strict=True):
                    _, position, flat, _ = checked(answer, topic, subscription)
                    for lane, *rest in rows(flat, _LISTED):
                        found[number, lane] = Parked(number, lane, *rest)
                    places[number] = position
                    if position == "0":
                        del places[number]
        return sorted(found.values(), key=lambda lane: (lane.since_ms, lane.partition, lane.lane))

    async def unpark(self, topic: str, subscription: str, lane: Parked, action: str) -> bool:
        """Let a lane go on, with the message that it is parked at or ("skip") without it.

        Returns False if it is not parked at that message any more.
        """
        entry = lane.id.rpartition("-")[2]
        answer: list[Any] = await self.store.run(
            "subscription/unpark",
            subscription_keys(topic, lane.partition, subscription),
            "",
            subscription,
            lane.lane,
            entry,
            action,
        )
        checked(answer, topic, subscription)
        if answer[0] == "NOT_PARKED":
            return False
        if answer[2]:
            self.on_outbox(topic, lane.partition)
        return True
