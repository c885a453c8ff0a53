"""The Keylane client: publish to topics and consume from subscriptions.

from client import AsyncClient

async with AsyncClient("keylane://localhost") as client:
    await client.publish("orders", b"42", key="customer-7")
"""

from client.aio import AsyncClient
from client.columns import Columns, Tally
from client.consumer import Consumer
from client.errors import (
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
    MessageTooLarge,
    Overloaded,
    PayloadMissing,
    ProtocolError,
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
from client.message import Batch, Message
from client.payloads import PayloadStore
from client.sync import Client
from client.sync_consumer import SyncConsumer
from client.sync_message import SyncMessage
from client.types import (
    Backoff,
    Claim,
    ClusterInfo,
    ClusterReport,
    LedgerInfo,
    OutgoingMessage,
    Page,
    PartitionInfo,
    PartitionMove,
    PartitionOffsets,
    PeekedMessage,
    Published,
    SubscriptionInfo,
    TopicInfo,
    WorkerAddress,
    WorkerInfo,
)

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
    "DurabilityNotReached",
    "Fenced",
    "Forbidden",
    "IncompatibleVersion",
    "InvalidArgument",
    "InvalidName",
    "LedgerInfo",
    "Message",
    "MessageLeased",
    "MessageNotFound",
    "MessageTooLarge",
    "OutgoingMessage",
    "Overloaded",
    "Page",
    "PartitionInfo",
    "PartitionMove",
    "PartitionOffsets",
    "PayloadMissing",
    "PayloadStore",
    "PeekedMessage",
    "ProtocolError",
    "Published",
    "StaleReceipt",
    "SubscriptionBusy",
    "SubscriptionExists",
    "SubscriptionInfo",
    "SubscriptionMoved",
    "SubscriptionNotFound",
    "SyncConsumer",
    "SyncMessage",
    "Tally",
    "TopicExists",
    "TopicInfo",
    "TopicNotFound",
    "TopicReplaced",
    "Unauthorized",
    "Unavailable",
    "WorkerAddress",
    "WorkerInfo",
]
