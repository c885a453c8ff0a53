"""Messages that are in the broker: skipped, deleted, or all of them purged."""

from keylane import Explanation, wire
from keylane_broker.http import values
from keylane_broker.http.operations import Call, operation

_TOPIC = "/v1/topics/{topic}"
_SUBSCRIPTION = _TOPIC + "/subscriptions/{subscription}"


@operation("GET", _SUBSCRIPTION + "/explain")
async def explain(call: Call, query: values.ExplainQuery) -> Explanation:
    """Say what becomes of a message for a subscription, and what would make it move."""
    return await call.client.explain(call.topic, call.subscription, query.id, partition=query.partition)


@operation("DELETE", _TOPIC + "/messages/{id}")
async def delete_message(call: Call, query: values.DeletionQuery) -> None:
    """Delete a message for all subscriptions, by its id, or the uid of a delayed or chosen one.

    One of a producer group goes only for who names that.
    """
    question = wire.DeleteMessage(
        call.topic, call.request.path_params["id"], query.partition, query.producer_group
    )
    await call.client._cluster.request(question, repeatable=False)


@operation("POST", _TOPIC + "/purge")
async def purge_topic(call: Call) -> values.Purged:
    """Delete all messages of a topic."""
    return values.Purged(await call.client.purge(call.topic))


@operation("POST", _SUBSCRIPTION + "/purge")
async def purge_subscription(call: Call) -> values.Purged:
    """Settle all that a subscription is owed."""
    return values.Purged(await call.client.purge(call.topic, call.subscription))


@operation("POST", _SUBSCRIPTION + "/skip")
async def skip(call: Call, body: values.Skip) -> None:
    """Settle a message for one subscription, also if it is leased."""
    await call.client.skip(call.topic, call.subscription, body.id)
