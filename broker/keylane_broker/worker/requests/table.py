"""What each request does: a table from a frame's type to a handler."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keylane import wire
from keylane.errors import ProtocolError
from keylane.wire import Type
from keylane_broker.worker.requests import cluster as cluster_commands
from keylane_broker.worker.requests import consumers as consumer_commands
from keylane_broker.worker.requests import readers as reader_commands
from keylane_broker.worker.requests import topics as topic_commands
from keylane_broker.worker.requests.topics import Reply

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker

Handler = Callable[["Worker", "Connection", Any, memoryview], Awaitable[Reply]]

# Those that may read and answer a lot.
HEAVY = {
    Type.PEEK,
    Type.TOPICS,
    Type.DESCRIBE_TOPIC,
    Type.DESCRIBE_SUBSCRIPTION,
    Type.CLUSTER,
    Type.READ,
    Type.OFFSETS,
    Type.OWED,
}

HANDLERS: dict[int, tuple[type[wire.Properties], Handler]] = {
    Type.INFO: (wire.Info, topic_commands.info),
    Type.CREATE_TOPIC: (wire.CreateTopic, topic_commands.create_topic),
    Type.CHANGE_TOPIC: (wire.ChangeTopic, topic_commands.change_topic),
    Type.DELETE_TOPIC: (wire.DeleteTopic, topic_commands.delete_topic),
    Type.TOPICS: (wire.Topics, topic_commands.topics),
    Type.DESCRIBE_TOPIC: (wire.DescribeTopic, topic_commands.describe_topic),
    Type.CREATE_SUBSCRIPTION: (wire.CreateSubscription, topic_commands.create_subscription),
    Type.DELETE_SUBSCRIPTION: (wire.DeleteSubscription, topic_commands.delete_subscription),
    Type.DESCRIBE_SUBSCRIPTION: (wire.DescribeSubscription, topic_commands.describe_subscription),
    Type.CHANGE_SUBSCRIPTION: (wire.ChangeSubscription, topic_commands.change_subscription),
    Type.SEEK: (wire.Seek, topic_commands.seek),
    Type.PEEK: (wire.Peek, topic_commands.peek),
    Type.SUBSCRIBE: (wire.Subscribe, consumer_commands.subscribe),
    Type.UNSUBSCRIBE: (wire.Unsubscribe, consumer_commands.unsubscribe),
    Type.ACK: (wire.Ack, consumer_commands.settle),
    Type.NACK: (wire.Nack, consumer_commands.settle),
    Type.EXTEND: (wire.Extend, consumer_commands.settle),
    Type.CLUSTER: (wire.Cluster, cluster_commands.cluster),
    Type.REBALANCE: (wire.Rebalance, cluster_commands.rebalance),
    Type.MOVE_PARTITION: (wire.MovePartition, cluster_commands.move_partition),
    Type.DRAIN: (wire.Drain, cluster_commands.drain),
    Type.READ: (wire.Read, reader_commands.read),
    Type.OFFSETS: (wire.Offsets, reader_commands.offsets),
    Type.OWED: (wire.Owed, reader_commands.owed),
    Type.CLAIM: (wire.Claim, reader_commands.claim),
    Type.COMMIT: (wire.Commit, reader_commands.commit),
}


async def carry_out(worker: "Worker", connection: "Connection", frame: wire.Frame) -> Reply:
    """Find the handler of a frame and run it."""
    try:
        properties, handler = HANDLERS[frame.type]
    except KeyError:
        raise ProtocolError(f"frames of type {frame.type} are not known here") from None
    return await handler(worker, connection, wire.properties_of(frame, properties), frame.body)
