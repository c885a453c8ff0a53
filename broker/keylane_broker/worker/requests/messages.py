"""What is asked about single messages."""

from keylane import wire
from keylane_broker.engine.messages import EndedLease, parse_id
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.explaining import explanation
from keylane_broker.worker.request_turns import DONE, Reply
from keylane_broker.worker.requests.subscriptions import one_place


async def skip(context: Context, _: Connection, request: wire.Skip, __: memoryview) -> Reply:
    topic, subscription = request.topic, request.subscription
    await one_place(context, topic, subscription, "skip a message of")
    partition, ended = await context.engine.skip(topic, subscription, request.id)
    await context.partitions.leases_ended(topic, partition, ended)
    await context.partitions.subscription_changed(topic, subscription)
    return DONE


async def delete_message(
    context: Context, _: Connection, request: wire.DeleteMessage, __: memoryview
) -> Reply:
    engine, topic, message = context.engine, request.topic, request.message
    if parse_id(message):
        await engine.delete_message(topic, message, group=request.group)
    else:
        await engine.delete_by_uid(topic, message, partition=request.partition, group=request.group)
    for subscription in await engine.subscriptions(topic):  # a lane may have waited for it
        await context.partitions.subscription_changed(topic, subscription)
    return DONE


async def explain(context: Context, _: Connection, request: wire.Explain, __: memoryview) -> Reply:
    engine, topic, subscription = context.engine, request.topic, request.subscription
    await one_place(context, topic, subscription, "look into")
    partition, found = await engine.explain(topic, subscription, request.message, request.partition)
    now_ms = context.clock.now_ms()
    return explanation(context.partitions, topic, subscription, partition, found, now_ms), b""


async def purge(context: Context, _: Connection, request: wire.Purge, __: memoryview) -> Reply:
    engine, topic = context.engine, request.topic
    if request.subscription and request.number == 0:
        await one_place(context, topic, request.subscription, "purge")

    async def tell(partition: int, ended: list[EndedLease]) -> None:
        await context.partitions.leases_ended(topic, partition, ended)

    purged = await engine.purge(topic, request.subscription, request.number, on_ended=tell)
    if purged.done:
        names = [request.subscription] if request.subscription else await engine.subscriptions(topic)
        for subscription in names:
            await context.partitions.subscription_changed(topic, subscription)
    return wire.PurgeReply(*purged), b""
