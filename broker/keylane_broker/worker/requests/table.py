"""What each request does: a table from a frame's type to a handler."""

from collections.abc import Awaitable, Callable
from typing import Any

from keylane import wire
from keylane.errors import ProtocolError
from keylane.wire import Type
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply
from keylane_broker.worker.requests import cluster, consumers, info, readers, subscriptions, topics

Handler = Callable[[Context, Connection, Any, memoryview], Awaitable[Reply]]

HANDLERS: dict[int, tuple[type[wire.Properties], Handler]] = {
    Type.INFO: (wire.Info, info.info),
    Type.CREATE_TOPIC: (wire.CreateTopic, topics.create_topic),
    Type.CHANGE_TOPIC: (wire.ChangeTopic, topics.change_topic),
    Type.DELETE_TOPIC: (wire.DeleteTopic, topics.delete_topic),
    Type.TOPICS: (wire.Topics, topics.topics),
    Type.DESCRIBE_TOPIC: (wire.DescribeTopic, topics.describe_topic),
    Type.CREATE_SUBSCRIPTION: (wire.CreateSubscription, subscriptions.create_subscription),
    Type.DELETE_SUBSCRIPTION: (wire.DeleteSubscription, subscriptions.delete_subscription),
    Type.DESCRIBE_SUBSCRIPTION: (wire.DescribeSubscription, subscriptions.describe_subscription),
    Type.CHANGE_SUBSCRIPTION: (wire.ChangeSubscription, subscriptions.change_subscription),
    Type.SEEK: (wire.Seek, subscriptions.seek),
    Type.PEEK: (wire.Peek, subscriptions.peek),
    Type.SUBSCRIBE: (wire.Subscribe, consumers.subscribe),
    Type.UNSUBSCRIBE: (wire.Unsubscribe, consumers.unsubscribe),
    Type.ACK: (wire.Ack, consumers.settle),
    Type.NACK: (wire.Nack, consumers.settle),
    Type.EXTEND: (wire.Extend, consumers.settle),
    Type.CLUSTER: (wire.Cluster, cluster.cluster),
    Type.REBALANCE: (wire.Rebalance, cluster.rebalance),
    Type.MOVE_PARTITION: (wire.MovePartition, cluster.move_partition),
    Type.DRAIN: (wire.Drain, cluster.drain),
    Type.READ: (wire.Read, readers.read),
    Type.OFFSETS: (wire.Offsets, readers.offsets),
    Type.OWED: (wire.Owed, readers.owed),
    Type.CLAIM: (wire.Claim, readers.claim),
    Type.COMMIT: (wire.Commit, readers.commit),
}


async def handle(context: Context, connection: Connection, frame: wire.Frame) -> Reply:
    """Find the handler of a frame and run it."""
    try:
        properties, handler = HANDLERS[frame.type]
    except KeyError:
        raise ProtocolError(f"frames of type {frame.type} are not known here") from None
    return await handler(context, connection, wire.properties_of(frame, properties), frame.body)
