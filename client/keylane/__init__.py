"""The Keylane client: publish to topics and consume from subscriptions.

from keylane import AsyncClient

async with AsyncClient("keylane://localhost") as client:
    await client.publish("orders", b"42", key="customer-7")
"""

from importlib import import_module
from typing import TYPE_CHECKING

from keylane.errors import (
    BacklogFull,
    BrokerError,
    ConnectionClosed,
    ConnectionFailed,
    ConsumerReplaced,
    DurabilityNotReached,
    Fenced,
    Forbidden,
    IncompatibleVersion,
    InvalidArgument,
    InvalidName,
    MessageLeased,
    MessageNotFound,
    MessagesLost,
    MessageTooLarge,
    Overloaded,
    PayloadMissing,
    ProtocolError,
    PublishFailed,
    StaleReceipt,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionMoved,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
    TopicReplaced,
    Unauthorized,
    Unavailable,
)
from keylane.types import (
    Backoff,
    Claim,
    ClusterInfo,
    ClusterReport,
    DeadLetter,
    Explanation,
    HotKey,
    LedgerInfo,
    NewToken,
    OutgoingMessage,
    Page,
    ParkedLane,
    PartitionInfo,
    PartitionMove,
    PartitionOffsets,
    PeekedMessage,
    Published,
    SubscriptionInfo,
    TokenInfo,
    TopicInfo,
    WorkerAddress,
    WorkerInfo,
)

if TYPE_CHECKING:
    from keylane.async_client import AsyncClient
    from keylane.consume.consumer import Consumer
    from keylane.consume.message import Batch, Message
    from keylane.consume.sync_message import SyncBatch, SyncMessage
    from keylane.payloads import PayloadStore
    from keylane.produce.columns import Columns, Tally
    from keylane.sync.client import Client
    from keylane.sync.consumer import SyncConsumer

__all__ = [
    "AsyncClient",
    "BacklogFull",
    "Backoff",
    "Batch",
    "BrokerError",
    "Claim",
    "Client",
    "ClusterInfo",
    "ClusterReport",
    "Columns",
    "ConnectionClosed",
    "ConnectionFailed",
    "Consumer",
    "ConsumerReplaced",
    "DeadLetter",
    "DurabilityNotReached",
    "Explanation",
    "Fenced",
    "Forbidden",
    "HotKey",
    "IncompatibleVersion",
    "InvalidArgument",
    "InvalidName",
    "LedgerInfo",
    "Message",
    "MessageLeased",
    "MessageNotFound",
    "MessageTooLarge",
    "MessagesLost",
    "NewToken",
    "OutgoingMessage",
    "Overloaded",
    "Page",
    "ParkedLane",
    "PartitionInfo",
    "PartitionMove",
    "PartitionOffsets",
    "PayloadMissing",
    "PayloadStore",
    "PeekedMessage",
    "ProtocolError",
    "PublishFailed",
    "Published",
    "StaleReceipt",
    "SubscriptionBusy",
    "SubscriptionExists",
    "SubscriptionInfo",
    "SubscriptionMoved",
    "SubscriptionNotFound",
    "SyncBatch",
    "SyncConsumer",
    "SyncMessage",
    "Tally",
    "TokenInfo",
    "TopicExists",
    "TopicInfo",
    "TopicNotFound",
    "TopicReplaced",
    "Unauthorized",
    "Unavailable",
    "WorkerAddress",
    "WorkerInfo",
]

__version__: str

# Imported when they are used: a command's --help needs none of them, and they take a third of a second.
_LATER = {
    "AsyncClient": "keylane.async_client",
    "Consumer": "keylane.consume.consumer",
    "Batch": "keylane.consume.message",
    "Message": "keylane.consume.message",
    "SyncBatch": "keylane.consume.sync_message",
    "SyncMessage": "keylane.consume.sync_message",
    "PayloadStore": "keylane.payloads",
    "Columns": "keylane.produce.columns",
    "Tally": "keylane.produce.columns",
    "Client": "keylane.sync.client",
    "SyncConsumer": "keylane.sync.consumer",
}

if not TYPE_CHECKING:  # to a type checker a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("importlib.metadata").version("keylane")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_LATER[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
