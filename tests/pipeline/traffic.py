"""Real traffic for the pipeline to look at: skewed keys, consumers that nack now and then, upheaval."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import anyio

from keylane import AsyncClient, OutgoingMessage
from keylane.types import Mode

BATCH = 1_000
NACKED = 0.002  # share of the messages that a consumer gives back
PATIENCE = 240.0  # seconds until everything must have been settled
HOT = {"hot-1": 0.20, "hot-2": 0.08}  # share of all messages


class Traffic:
    """Messages for one topic, and what its consumers have made of them."""

    def __init__(self, topic: str, messages: int, subscriptions: dict[str, Mode], seed: int) -> None:
        self.topic = topic
        self.messages = messages
        self.subscriptions = subscriptions
        self.published: dict[str, str] = {}  # id -> key, in the order published
        self.seen: dict[str, set[str]] = defaultdict(set)  # subscription -> ids
        self.nacked: Counter[str] = Counter()  # by subscription
        self._random = random.Random(seed)

    async def run(self, url: str, upheaval: Callable[[], None]) -> None:
        """Publish and consume it all; `upheaval` happens, in a thread, when half is published."""
        async with AsyncClient(url, timeout=60) as client:
            for name, mode in self.subscriptions.items():
                await client.create_subscription(self.topic, name, mode=mode, exist_ok=True)
            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as group:
                    for name, mode in self.subscriptions.items():
                        group.start_soon(self._consume, url, name, mode)
                    for number, batch in enumerate(self._batches()):
                        if number == self.messages // BATCH // 2:
                            group.start_soon(anyio.to_thread.run_sync, upheaval)
                        for message, answer in zip(
                            batch, await client.publish_many(self.topic, batch), strict=True
                        ):
                            assert answer.id is not None
                            self.published[answer.id] = message.key or ""
                    for name in self.subscriptions:
                        while (await client.describe_subscription(self.topic, name)).backlog:  # noqa: ASYNC110
                            await anyio.sleep(0.1)  # nobody tells when the last one is settled
                    group.cancel_scope.cancel()

    def _batches(self) -> Iterator[list[OutgoingMessage]]:
        hot, weights = [*HOT, ""], [*HOT.values(), 1 - sum(HOT.values())]
        for start in range(0, self.messages, BATCH):
            keys = self._random.choices(hot, weights, k=min(BATCH, self.messages - start))
            yield [
                OutgoingMessage(
                    f"body {start + place}",
                    key or f"customer-{self._random.randrange(5_000)}",
                    {"number": str(start + place)},
                )
                for place, key in enumerate(keys)
            ]

    async def _consume(self, url: str, name: str, mode: Mode) -> None:
        """Settle what comes until cancelled; what is given back comes again."""
        async with (
            AsyncClient(url, timeout=60) as client,
            client.subscribe(self.topic, name, mode=mode) as consumer,
        ):
            async for batch in consumer.batches(max_messages=BATCH, max_wait=0.2):
                messages = list(batch)
                self.seen[name].update(message.id for message in messages)
                back = {message.id for message in messages if self._random.random() < NACKED}
                self.nacked[name] += len(back)
                await consumer.nack([message for message in messages if message.id in back], delay=0)
                await consumer.ack([message for message in messages if message.id not in back])
