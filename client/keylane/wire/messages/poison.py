"""Requests about messages that have failed too often: dead letters and parked lanes."""

import msgspec

from keylane.wire.frames import Properties, Type


class Withdraw(Properties, frozen=True):
    """WITHDRAW: redrive dead letters, or delete them; answered by OK with WithdrawReply.

    The body is an array of entries of the partition, at most 1,000.
    """

    TYPE = Type.WITHDRAW

    topic: str  # the one that keeps them
    partition: int
    purge: bool = False


class WithdrawReply(Properties, frozen=True):
    """How many went; the rest is gone, with a consumer, or failed in a subscription that is gone."""

    taken: int


class Parked(Properties, frozen=True):
    """PARKED; answered by OK with an array of ParkedLane in the body, longest parked first."""

    TYPE = Type.PARKED

    topic: str
    subscription: str


class ParkedLane(msgspec.Struct, frozen=True):
    """A lane that has stopped at a message, which has no retry left."""

    key: str
    id: str
    since_ms: int
    retries: int
    consumer: str
    reason: str
    waiting: int


class Unpark(Properties, frozen=True):
    """UNPARK: let lanes of a key go on; answered by OK with UnparkReply."""

    TYPE = Type.UNPARK

    topic: str
    subscription: str
    key: str = ""  # "": those without a key
    id: str = ""  # of the message that the lane must be parked at, "" for any
    action: str = "resume"


class UnparkReply(Properties, frozen=True):
    """How many lanes go on."""

    lanes: int
