"""A tour of the engine: every line printed is something that just happened."""

import time
from collections.abc import Callable

from broker.checker import check_topic
from broker.engine import Engine
from broker.results import FetchResult, Outgoing, Room, SubscriptionSettings, TopicSettings
from client.wire import pack_about

TOPIC, SUBSCRIPTION = "orders", "billing"


async def tour(url: str, say: Callable[[str], None]) -> None:
    """Publish, consume by key, nack, time out, crash and take over, and prove that all is well."""
    engine = Engine.connect(url)
    try:
        if TOPIC in await engine.topics():
            await engine.delete_topic(TOPIC)
        await _tour(engine, say)
    finally:
        await engine.close()


async def _tour(engine: Engine, say: Callable[[str], None]) -> None:
    await engine.create_topic(TOPIC, TopicSettings(partitions=1))
    await engine.create_subscription(TOPIC, SUBSCRIPTION, SubscriptionSettings(mode="key_shared"))
    lease = await engine.acquire(TOPIC, 0, "worker-1", ttl_ms=60_000)
    assert lease is not None
    say(f"topic {TOPIC!r} with a key-shared subscription; {lease.worker} holds it in ledger {lease.epoch}")

    orders = [
        Outgoing(f"customer-{number % 3}", f"order-{number}", pack_about(int(time.time() * 1000)))
        for number in range(9)
    ]
    result = await engine.publish(lease, orders)
    ids = [published.id for published in result.each()]
    say(f"published 9 orders of 3 customers: {ids[0]} … {ids[-1]}")
    again = (await engine.publish(lease, orders[:1])).each()[0]
    say(f"the first one again: duplicate={again.duplicate}, id {again.id}")

    for consumer in ("anna", "bert"):
        await engine.join(lease, SUBSCRIPTION, consumer)
    fetched = await engine.fetch(lease, SUBSCRIPTION, [Room("anna", 10), Room("bert", 10)])
    _show("each customer's orders go to one consumer, in order", fetched, say)

    head = fetched.deliveries[0]
    await engine.nack(lease, SUBSCRIPTION, [head.receipt], delay_ms=0)
    say(f"{head.consumer} gives {head.messages[0].id} back: that lane rewinds, the others do not notice")
    rewound = await engine.fetch(lease, SUBSCRIPTION, [Room("anna", 10), Room("bert", 10)])
    _show("redelivered", rewound, say)

    stale = await engine.ack(lease, SUBSCRIPTION, [head.receipt])
    say(f"an ack with the old receipt is answered {stale.outcomes(1)[0]!r}")
    released = await engine.leave(lease, SUBSCRIPTION, "bert", crashed=True)
    say(f"bert crashes: {released} lane(s) come back")
    taken = await engine.fetch(lease, SUBSCRIPTION, [Room("anna", 10)])
    _show("anna takes them over", taken, say)

    held = await engine.held(lease, SUBSCRIPTION, "anna")
    done = await engine.ack(lease, SUBSCRIPTION, [delivery.receipt for delivery in held])
    say(f"anna acks all she holds; {sum(b - a + 1 for a, b in done.forgotten)} entries leave the log")

    await engine.release(lease)
    successor = await engine.acquire(TOPIC, 0, "worker-2", ttl_ms=60_000, known_epoch=lease.epoch)
    assert successor is not None
    say(f"{successor.worker} takes the partition: ledger {successor.epoch}; {lease.worker} is fenced")
    problems = await check_topic(engine, TOPIC)
    say(f"the keyspace checker finds {len(problems)} problems")


def _show(what: str, fetched: FetchResult, say: Callable[[str], None]) -> None:
    say(f"{what}:")
    for delivery in fetched.deliveries:
        for message in delivery.messages:
            retries = f", retry {message.retries}" if message.retries else ""
            say(f"  {delivery.consumer:5} {message.id:6} {message.key}{retries}")
