"""What each operation is, as far as permissions go: one table for the binary protocol and for HTTP."""

from typing import Literal, get_args

Action = Literal["produce", "consume", "observe", "admin"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Need = Literal[Action, "use"]  # use: produce or consume, one of them

# An operation by its name: that of a frame's type, in small letters, and of an operation of HTTP. What
# concerns a topic needs the action there; what concerns none needs it everywhere.
NEEDS: dict[str, Need] = {
    "publish": "produce",
    "put_body": "produce",
    "store_bodies": "produce",
    "sync_bodies": "produce",
    "get_body": "consume",
    "read_bodies": "consume",
    "has_bodies": "consume",
    "delete_body": "use",  # of what was not published, or, where delivery is at most once, has been read
    "delete_bodies": "use",
    "delete_message": "produce",
    "subscribe": "consume",
    "create_subscription": "consume",
    "seek": "consume",
    "read": "consume",
    "offsets": "consume",
    "claim": "consume",
    "commit": "consume",
    "owed": "consume",
    "lease": "consume",
    "ack": "consume",
    "nack": "consume",
    "extend": "consume",
    "events": "consume",
    "info": "observe",
    "topics": "observe",
    "describe_topic": "observe",
    "partitions": "observe",
    "subscriptions": "observe",
    "describe_subscription": "observe",
    "peek": "observe",
    "explain": "observe",
    "hot_keys": "observe",
    "dead_letters": "observe",
    "parked": "observe",
    "cluster": "observe",
    "metrics": "observe",
    "create_topic": "admin",
    "change_topic": "admin",
    "delete_topic": "admin",
    "delete_subscription": "admin",
    "change_subscription": "admin",
    "skip": "admin",
    "withdraw": "admin",
    "redrive": "admin",
    "purge_dead_letters": "admin",
    "unpark": "admin",
    "move_key": "admin",
    "purge": "admin",
    "purge_topic": "admin",
    "purge_subscription": "admin",
    "rebalance": "admin",
    "move_partition": "admin",
    "drain": "admin",
    "drain_worker": "admin",
    "create_token": "admin",
    "tokens": "admin",
    "revoke_token": "admin",
}
