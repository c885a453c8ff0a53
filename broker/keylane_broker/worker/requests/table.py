"""What each request does: a table from a frame's type to a handler."""

from collections.abc import Awaitable, Callable
from typing import Any

from keylane import wire
from keylane.errors import ProtocolError
from keylane.wire import Type
from keylane_broker.access.actions import NEEDS
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply
from keylane_broker.worker.requests import (
    cluster,
    consumers,
    info,
    messages,
    poison,
    readers,
    subscriptions,
    tokens,
    topics,
)

Handler = Callable[[Context, Connection, Any, memoryview], Awaitable[Reply]]

HANDLERS: dict[int, tuple[type[wire.Properties], Handler]] = {
    Type.INFO: (wire.Info, info.info),
    Type.CREATE_TOPIC: (wire.CreateTopic, topics.create_topic),
    Type.CHANGE_TOPIC: (wire.ChangeTopic, topics.change_topic),
    Type.DELETE_TOPIC: (wire.DeleteTopic, topics.delete_topic),
    Type.TOPICS: (wire.Topics, topics.topics),
    Type.DESCRIBE_TOPIC: (wire.DescribeTopic, topics.describe_topic),
    Type.HOT_KEYS: (wire.HotKeys, topics.hot_keys),
    Type.CREATE_SUBSCRIPTION: (wire.CreateSubscription, subscriptions.create_subscription),
    Type.DELETE_SUBSCRIPTION: (wire.DeleteSubscription, subscriptions.delete_subscription),
    Type.DESCRIBE_SUBSCRIPTION: (wire.DescribeSubscription, subscriptions.describe_subscription),
    Type.CHANGE_SUBSCRIPTION: (wire.ChangeSubscription, subscriptions.change_subscription),
    Type.SEEK: (wire.Seek, subscriptions.seek),
    Type.PEEK: (wire.Peek, subscriptions.peek),
    Type.SKIP: (wire.Skip, messages.skip),
    Type.DELETE_MESSAGE: (wire.DeleteMessage, messages.delete_message),
    Type.EXPLAIN: (wire.Explain, messages.explain),
    Type.PURGE: (wire.Purge, messages.purge),
    Type.SUBSCRIBE: (wire.Subscribe, consumers.subscribe),
    Type.UNSUBSCRIBE: (wire.Unsubscribe, consumers.unsubscribe),
    Type.ACK: (wire.Ack, consumers.settle),
    Type.NACK: (wire.Nack, consumers.settle),
    Type.EXTEND: (wire.Extend, consumers.settle),
    Type.CREATE_TOKEN: (wire.CreateToken, tokens.create_token),
    Type.TOKENS: (wire.Tokens, tokens.tokens),
    Type.REVOKE_TOKEN: (wire.RevokeToken, tokens.revoke_token),
    Type.CLUSTER: (wire.Cluster, cluster.cluster),
    Type.REBALANCE: (wire.Rebalance, cluster.rebalance),
    Type.MOVE_PARTITION: (wire.MovePartition, cluster.move_partition),
    Type.DRAIN: (wire.Drain, cluster.drain),
    Type.READ: (wire.Read, readers.read),
    Type.OFFSETS: (wire.Offsets, readers.offsets),
    Type.OWED: (wire.Owed, readers.owed),
    Type.CLAIM: (wire.Claim, readers.claim),
    Type.COMMIT: (wire.Commit, readers.commit),
    Type.WITHDRAW: (wire.Withdraw, poison.withdraw),
    Type.PARKED: (wire.Parked, poison.parked),
    Type.UNPARK: (wire.Unpark, poison.unpark),
    Type.MOVE_KEY: (wire.MoveKey, subscriptions.move_key),
}


async def handle(context: Context, connection: Connection, frame: wire.Frame) -> Reply:
    """Find the handler of a frame and run it."""
    try:
        properties, handler = HANDLERS[frame.type]
    except KeyError:
        raise ProtocolError(f"unknown frame type {frame.type}") from None
    request = wire.properties_of(frame, properties)
    _check(context, connection, frame.type, request)
    return await handler(context, connection, request, frame.body)


# About a consumer that was let in when it subscribed; and what shows only what one may see.
_FOR_ALL = {Type.INFO, Type.UNSUBSCRIBE, Type.ACK, Type.NACK, Type.EXTEND, Type.TOPICS}


def _check(context: Context, connection: Connection, type: int, request: wire.Properties) -> None:
    """Raise Forbidden, or Unauthorized, unless who is at the other end may do this."""
    if type != Type.INFO:
        context.access.check(connection.identity)
    if type not in _FOR_ALL:
        action = NEEDS[Type(type).name.lower()]
        connection.identity.require(action, getattr(request, "topic", None) or None)
