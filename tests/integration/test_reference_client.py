"""docs/reference_client.py, which follows docs/protocol.md alone, beside workers that are killed."""

import importlib.util
import json
import socket
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.running import RunningBroker

PAGE = Path(__file__).resolve().parents[2] / "docs"
DELETE_TOPIC, DESCRIBE_TOPIC = 15, 17
KEYS = [f"key-{number}" for number in range(12)]


def load() -> ModuleType:
    """The module, which is in no package."""
    spec = importlib.util.spec_from_file_location("reference_client", PAGE / "reference_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["PATIENCE"] = 120.0  # machines stall
    return module


reference = load()


def seeds(broker: RunningBroker) -> str:
    """Where the workers are."""
    return broker.url.removeprefix("keylane://")


def test_it_is_small_and_needs_little() -> None:
    text = (PAGE / "reference_client.py").read_text("utf-8")
    assert len(text.splitlines()) < 400
    assert "import msgpack" in text
    assert not any(f"import {name}" in text for name in ("client", "broker", "msgspec", "redis"))


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
def test_it_publishes_consumes_nacks_and_acks(broker: RunningBroker, topic: str, mode: str) -> None:
    client = reference.Client(seeds(broker))
    client.ask(reference.CREATE_TOPIC, topic=topic, partitions=2)
    client.ask(reference.CREATE_SUBSCRIPTION, topic=topic, subscription="s", mode=mode)
    ids = client.publish(topic, [("a", b"one"), ("a", b""), ("b", b"three")], region="eu")
    assert len(set(ids)) == 3
    with reference.Consumer(client, topic, "s") as consumer:
        first = consumer.receive(10)
        assert consumer.nack(first)
        assert not consumer.nack(first)
        found: dict[str, bytes] = {}
        while len(found) < 3:
            message = consumer.receive(10)
            assert json.loads(message.about.split(" ", 4)[4]) == {"region": "eu"}
            assert message.retries == (message.id == first.id)
            found[message.id] = consumer.body(message)
            assert consumer.ack(message)
            assert not consumer.ack(message)
        assert found == dict(zip(ids, [b"one", b"", b"three"], strict=True))
        assert consumer.receive(0.1) is None
    client.close()


def test_what_is_refused_has_a_name(broker: RunningBroker, topic: str) -> None:
    client = reference.Client(seeds(broker))
    with pytest.raises(reference.Refused) as refused:
        client.publish(topic, [("", b"")])
    assert refused.value.args[0] == "topic_not_found"
    client.ask(reference.CREATE_TOPIC, topic=topic, partitions=1)
    consumer = reference.Consumer(client, topic, "s", name="me")
    with consumer, reference.Consumer(client, topic, "s", name="me"):
        with pytest.raises(reference.Refused) as refused:
            consumer.receive(10)
        assert refused.value.args[0] == "consumer_replaced"
    client.close()


def make_anew(client: Any, topic: str, partitions: int) -> None:
    """Delete a topic and make another one of its name, which has no subscription."""
    client.ask(DELETE_TOPIC, topic=topic)
    client.ask(reference.CREATE_TOPIC, topic=topic, partitions=partitions)


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_a_consumer_that_was_cut_off_does_not_go_on_in_another_topic_of_that_name(
    broker: RunningBroker, topic: str, partitions: int
) -> None:
    client = reference.Client(seeds(broker))
    client.ask(reference.CREATE_TOPIC, topic=topic, partitions=2)
    consumer = reference.Consumer(client, topic, "s")
    with consumer:
        for link in set(consumer.links.values()):
            link.socket.shutdown(socket.SHUT_RDWR)
        make_anew(client, topic, partitions)
        with pytest.raises(reference.Refused) as refused:
            consumer.receive(10)
        assert refused.value.args[0] == "topic_replaced"
    assert client.ask(DESCRIBE_TOPIC, topic=topic, counts=True).get("subscriptions") is None
    client.close()


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_what_is_published_while_a_topic_is_made_anew_is_placed_by_its_new_number_of_partitions(
    broker: RunningBroker, topic: str, partitions: int
) -> None:
    class Late(reference.Client):  # type: ignore[misc, name-defined]
        """Stores bodies, between the map and the publish, only when the topic is another one."""

        def bodies(self, *commands: list[Any]) -> Any:
            if not done:
                done.append(True)
                make_anew(client, topic, partitions)
                client.ask(reference.CREATE_SUBSCRIPTION, topic=topic, subscription="s")
            return super().bodies(*commands)

    done: list[bool] = []
    client, late = reference.Client(seeds(broker)), Late(seeds(broker))
    client.ask(reference.CREATE_TOPIC, topic=topic, partitions=2)
    ids = late.publish(topic, [(key, key.encode()) for key in KEYS])
    assert [int(id.partition(":")[0]) for id in ids] == [
        zlib.crc32(key.encode()) % partitions for key in KEYS
    ]
    with reference.Consumer(client, topic, "s") as consumer:
        found = [consumer.receive(10) for _ in KEYS]
        assert {message.key: consumer.body(message) for message in found} == {
            key: key.encode() for key in KEYS
        }
    client.close()
    late.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_no_key_loses_its_order_while_workers_are_killed(topic: str) -> None:
    """Three workers, each killed in turn while two consumers take, nack and ack what a producer publishes."""
    with RunningBroker(workers=3, session=3.0, heartbeat=1.0) as broker:
        producer = reference.Client(seeds(broker))
        producer.ask(reference.CREATE_TOPIC, topic=topic, partitions=6)
        producer.ask(reference.CREATE_SUBSCRIPTION, topic=topic, subscription="s", mode="key_shared")
        sent: dict[str, list[str]] = {key: [] for key in KEYS}
        settled: dict[str, list[str]] = {key: [] for key in KEYS}  # in the order of their acks
        acked, late = set[str](), set[str]()  # ids; late is what had no body any more when it was looked at
        clients = [producer]
        stop, done, troubles = threading.Event(), threading.Event(), list[BaseException]()

        def produce() -> None:
            number = 0
            while not stop.is_set():
                batch = [(key, f"{key} {number:06}".encode()) for key in KEYS]
                producer.publish(topic, batch)
                for key, body in batch:
                    sent[key].append(body.decode())
                number += 1
                time.sleep(0.01)

        def consume(name: str) -> None:
            client, count = reference.Client(seeds(broker)), 0
            clients.append(client)
            with reference.Consumer(client, topic, "s", name=name, permits=50) as consumer:
                while not done.is_set():
                    message = consumer.receive(0.2)
                    if message is None:
                        continue
                    count += 1
                    if count % 50 == 0:
                        consumer.nack(message)
                        continue
                    try:
                        body = consumer.body(message).decode()
                    except KeyError:
                        assert not consumer.nack(message), f"{message} is owed and has no body"
                        late.add(message.id)
                        continue
                    settled[message.key].append(body)  # also if it is stale: it may have been done before
                    acked.add(message.id)
                    consumer.ack(message)

        def run(step: Any, *arguments: str) -> threading.Thread:
            def guarded() -> None:
                try:
                    step(*arguments)
                except BaseException as error:
                    troubles.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            return thread

        threads = [run(produce), run(consume, "c1"), run(consume, "c2")]
        try:
            for worker in range(3):
                wanted = sum(map(len, settled.values())) + 200
                while sum(map(len, settled.values())) < wanted and not troubles:
                    time.sleep(0.05)
                broker.kill_worker(worker)
                time.sleep(1.0)
                broker.start_worker(worker)
            stop.set()
            threads[0].join()
            end = time.monotonic() + 180
            while any(set(settled[key]) < set(sent[key]) for key in KEYS) and time.monotonic() < end:
                if troubles:
                    break
                time.sleep(0.1)
        finally:
            stop.set()
            done.set()
            for thread in threads:
                thread.join()
            for client in clients:
                client.close()
        assert not troubles
        assert late <= acked, "a body goes only with its message, which another has settled meanwhile"
        for key in KEYS:
            assert set(sent[key]) <= set(settled[key]), "nothing is lost"
            first = list(dict.fromkeys(settled[key]))
            assert first == sorted(first), f"{key} in order"
            again = sum(Counter(settled[key]).values()) - len(first)
            assert again < len(first), "duplicates only of what was in flight"
