"""Brokers on a server or a cluster, and that nothing is left of the messages of a topic."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from keylane import AsyncClient
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.running import RunningBroker
from tests.support.waiting import until

PLACES = ["one server", "a cluster"]


@contextlib.contextmanager
def broker_on(place: str, binary: Path, workers: int = 2) -> Iterator[RunningBroker]:
    """Two workers or more, so that the one that is asked is not always the one that serves."""
    with contextlib.ExitStack() as stack:
        url = None
        if place == "a cluster":
            cluster = stack.enter_context(three_node_cluster(binary=binary))
            url = cluster.url.replace("redis://", "redis+cluster://")
        yield stack.enter_context(RunningBroker(url, workers=workers))


async def is_empty(client: AsyncClient, topic: str) -> bool:
    """Whether nothing is left in the logs."""
    return (await client.describe_topic(topic)).messages == 0


async def leaves_nothing(broker: RunningBroker, topic: str) -> None:
    """The keyspace is as it should be, and no body is left."""
    engine = Engine.connect(broker.redis_url)

    async def has_no_bodies() -> bool:  # in the payload store, which is the same Redis
        return not await engine.store.keys_like(f"kl:bodies:{topic}:*")

    try:
        assert await check_topic(engine, topic) == []
        await until(has_no_bodies)
    finally:
        await engine.close()
