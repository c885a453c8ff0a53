"""Topics, subscriptions and the cluster."""

from datetime import datetime

import msgspec

from keylane import (
    ClusterReport,
    HotKey,
    NewToken,
    PartitionInfo,
    PartitionMove,
    SubscriptionInfo,
    TokenInfo,
    TopicInfo,
)
from keylane_broker.http import values
from keylane_broker.http.operations import Call, operation

_TOPIC = "/v1/topics/{topic}"
_SUBSCRIPTION = _TOPIC + "/subscriptions/{subscription}"


def position(text: str) -> str | datetime:
    """Return a position as the client takes it: a time is one that looks like it."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


@operation("GET", "/v1/info")
async def info(call: Call) -> values.Info:
    """Describe the broker."""
    said = await call.client.info()
    return values.Info(said.version, said.worker, [worker.id for worker in said.workers], said.time)


@operation("GET", "/v1/topics")
async def topics(call: Call) -> values.Topics:
    """List topics."""
    names = await call.client.topics()
    return values.Topics([name for name in names if call.identity.may("observe", name)])


@operation("POST", "/v1/topics", status=201)
async def create_topic(call: Call, body: values.NewTopic) -> TopicInfo:
    """Create a topic."""
    call.identity.require("admin", body.name)
    return await call.client.create_topic(**body.options())


@operation("GET", _TOPIC)
async def describe_topic(call: Call) -> TopicInfo:
    """Describe a topic."""
    return await call.client.describe_topic(call.topic)


@operation("PATCH", _TOPIC)
async def change_topic(call: Call, body: values.TopicChange) -> TopicInfo:
    """Change settings of a topic."""
    return await call.client.change_topic(call.topic, **body.options())


@operation("DELETE", _TOPIC)
async def delete_topic(call: Call) -> None:
    """Delete a topic with all its messages and subscriptions."""
    await call.client.delete_topic(call.topic)


@operation("GET", _TOPIC + "/hot-keys")
async def hot_keys(call: Call, query: values.HotKeysQuery) -> list[HotKey]:
    """Name the keys under which most is published of late."""
    return await call.client.hot_keys(call.topic, limit=query.limit)


@operation("GET", _TOPIC + "/partitions")
async def partitions(call: Call) -> list[PartitionInfo]:
    """Say which worker serves each partition."""
    return await call.client.partitions(call.topic)


@operation("POST", _TOPIC + "/partitions/{partition}/move")
async def move_partition(call: Call, body: values.Move) -> None:
    """Move a partition to a worker."""
    partition = msgspec.convert(call.request.path_params["partition"], int, strict=False)
    await call.client.move_partition(call.topic, partition, **body.options())


@operation("GET", _TOPIC + "/subscriptions")
async def subscriptions(call: Call) -> values.Subscriptions:
    """List subscriptions of a topic."""
    return values.Subscriptions((await call.client.describe_topic(call.topic)).subscriptions)


@operation("POST", _TOPIC + "/subscriptions", status=201)
async def create_subscription(call: Call, body: values.NewSubscription) -> SubscriptionInfo:
    """Create a subscription."""
    call.identity.require_dead_letter(call.topic, body.dead_letter or None)
    start = position(body.start)
    await call.client.create_subscription(call.topic, start=start, **body.options("start"))
    return await call.client.describe_subscription(call.topic, body.name)


@operation("GET", _SUBSCRIPTION)
async def describe_subscription(call: Call) -> SubscriptionInfo:
    """Describe a subscription."""
    return await call.client.describe_subscription(call.topic, call.subscription)


@operation("PATCH", _SUBSCRIPTION)
async def change_subscription(call: Call, body: values.SubscriptionChange) -> SubscriptionInfo:
    """Change settings of a subscription, or pause or resume it."""
    call.identity.require_dead_letter(call.topic, body.dead_letter or None)
    changes = body.options("paused")
    if changes:
        await call.client.change_subscription(call.topic, call.subscription, **changes)
    if body.paused is True:
        await call.client.pause_subscription(call.topic, call.subscription)
    elif body.paused is False:
        await call.client.resume_subscription(call.topic, call.subscription)
    return await describe_subscription(call)


@operation("DELETE", _SUBSCRIPTION)
async def delete_subscription(call: Call) -> None:
    """Delete a subscription, and the messages that only it was owed."""
    await call.client.delete_subscription(call.topic, call.subscription)


@operation("POST", _SUBSCRIPTION + "/seek")
async def seek(call: Call, body: values.Position) -> None:
    """Move a subscription to a position."""
    await call.client.seek(call.topic, call.subscription, position(body.position))


@operation("GET", "/v1/cluster")
async def cluster(call: Call) -> ClusterReport:
    """Describe the workers and their load."""
    return await call.client.cluster()


@operation("GET", "/v1/tokens")
async def tokens(call: Call) -> list[TokenInfo]:
    """List tokens, without their secrets."""
    return await call.client.tokens()


@operation("POST", "/v1/tokens", status=201)
async def create_token(call: Call, body: values.NewTokenRequest) -> NewToken:
    """Create a token, which is told once."""
    return await call.client.create_token(body.name, body.allow, lifetime=body.lifetime)


@operation("DELETE", "/v1/tokens/{token}")
async def revoke_token(call: Call) -> None:
    """Revoke a token; whoever uses it is disconnected."""
    await call.client.revoke_token(call.request.path_params["token"])


@operation("POST", "/v1/cluster/rebalance")
async def rebalance(call: Call, body: values.Rebalance) -> list[PartitionMove]:
    """Rebalance partitions now, or say what would be done."""
    return await call.client.rebalance(dry_run=body.dry_run)


@operation("POST", "/v1/cluster/workers/{worker}/drain")
async def drain_worker(call: Call, body: values.Drain) -> None:
    """Take all partitions from a worker, or let it have some again."""
    worker = call.request.path_params["worker"]
    await (call.client.drain_worker(worker) if body.draining else call.client.undrain_worker(worker))
