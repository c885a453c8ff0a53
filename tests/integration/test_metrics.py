"""/metrics on a real broker: what is counted is what was done, and what is said of it is true."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from keylane import Client, OutgoingMessage, wire
from keylane_broker.engine.engine import Engine
from keylane_broker.store.keys import partition_keys
from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import single_server
from tests.support.peer import Elsewhere, Refused, Stream, connect, publish, receipts
from tests.support.running import RunningBroker
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.slow  # several brokers

ROOT = Path(__file__).resolve().parents[2]
SOON = 60.0
ADMIN = "the token of an administrator"


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    with RunningBroker(workers=2, http=True) as broker:
        yield broker


@pytest.fixture
def client(served: RunningBroker) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def scrape(url: str) -> dict[str, list[Sample]]:
    answer = httpx.get(f"{url}/metrics", timeout=SOON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


Scrapes = list[dict[str, list[Sample]]]


def scrape_all(broker: RunningBroker) -> Scrapes:
    return [scrape(url) for url in broker.http_urls]


def total(seen: RunningBroker | Scrapes, name: str, **labels: str) -> float:
    """The sum over all workers, as Prometheus makes it; of a broker, now."""
    return sum(
        sample.value
        for found in (scrape_all(seen) if isinstance(seen, RunningBroker) else seen)
        for sample in found.get(name, [])
        if labels.items() <= sample.labels.items()
    )


def test_every_message_is_counted_once_for_what_becomes_of_it(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=4)
    client.create_subscription(topic, "s", mode="key_shared", max_retries=1, backoff=None)
    client.publish_many(topic, [OutgoingMessage(b"", key=f"k{number}") for number in range(100)])
    client.publish(topic, b"", key="k0", uid="twice")
    assert client.publish(topic, b"", key="k0", uid="twice").duplicate
    with client.subscribe(topic, "s", mode="key_shared") as consumer:
        kept = {}
        for _ in range(101):
            message = consumer.receive(timeout=SOON)
            kept[message.id] = message
        poison = next(message for message in kept.values() if message.key == "k7")
        del kept[poison.id]
        poison.nack(delay=0)
        again = consumer.receive(timeout=SOON)
        assert again.id == poison.id
        again.nack(delay=0)
        assert consumer.ack(list(kept.values())) == ["settled"] * 100
    own, seen = {"topic": topic, "subscription": "s"}, scrape_all(served)
    assert total(seen, "keylane_messages_published_total", topic=topic) == 101
    assert total(seen, "keylane_messages_duplicate_total", topic=topic) == 1
    assert total(seen, "keylane_messages_delivered_total", **own) == 102
    assert total(seen, "keylane_messages_redelivered_total", **own) == 1
    assert total(seen, "keylane_messages_acked_total", **own) == 100
    assert total(seen, "keylane_messages_nacked_total", **own) == 2
    assert total(seen, "keylane_messages_dead_lettered_total", **own) == 1
    for name in ("publish_seconds", "delivery_seconds"):
        assert total(seen, f"keylane_{name}_count") > 0
    assert total(seen, "keylane_batch_messages_sum", operation="publish") >= 101
    assert total(seen, "keylane_script_seconds_count") > 0


def test_what_goes_the_quick_way_is_counted_too(served: RunningBroker, client: Client, topic: str) -> None:
    """Stored and leased in one call, and acked as it was leased."""
    client.create_topic(topic, partitions=1)
    with client.subscribe(topic, "s") as consumer:
        for _ in range(20):
            client.publish(topic)
            consumer.receive(timeout=SOON).ack()
    own, seen = {"topic": topic, "subscription": "s"}, scrape_all(served)
    assert total(seen, "keylane_messages_published_total", topic=topic) == 20
    assert total(seen, "keylane_messages_delivered_total", **own) == 20
    assert total(seen, "keylane_messages_acked_total", **own) == 20


@pytest.mark.slow
def test_messages_that_expire_time_out_or_have_no_subscription_are_counted(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    assert client.publish(topic, b"").no_subscribers
    assert total(served, "keylane_messages_unowed_total", topic=topic) == 1
    client.create_subscription(topic, "s")
    client.publish(topic, b"", ttl=0.05)
    wait_until(lambda: total(served, "keylane_messages_expired_total", topic=topic) == 1)
    client.publish(topic, b"")
    with client.subscribe(topic, "s", lease=0.2, auto_extend=False) as consumer:
        consumer.receive(timeout=SOON)
        wait_until(lambda: total(served, "keylane_messages_timed_out_total", topic=topic) >= 1)


@pytest.mark.slow
def test_backlog_pending_and_age_are_those_of_now(served: RunningBroker, client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=4)
    client.create_subscription(topic, "s", mode="key_shared")
    client.create_subscription(topic, "t")
    client.publish_many(topic, [OutgoingMessage(b"", key=f"k{number % 10}") for number in range(200)])
    client.publish(topic, b"", delay=3600)

    def said(name: str, subscription: str) -> float:
        return total(served, name, topic=topic, subscription=subscription)

    with client.subscribe(topic, "s", mode="key_shared", permits=50) as consumer:
        held = [consumer.receive(timeout=SOON) for _ in range(50)]
        wait_until(lambda: said("keylane_pending_messages", "s") == 50)
        wait_until(lambda: said("keylane_backlog_messages", "s") == 150)
        assert said("keylane_backlog_messages", "t") == 200
        assert said("keylane_pending_messages", "t") == 0
        assert total(served, "keylane_delayed_messages", topic=topic) == 1
        assert total(served, "keylane_stored_messages", topic=topic) == 200
        for name in ("s", "t"):
            assert said("keylane_oldest_message_age_seconds", name) > 0
        consumer.nack(held[:5], delay=3600)
        wait_until(lambda: said("keylane_pending_messages", "s") <= 50)
    client.purge(topic)
    wait_until(lambda: said("keylane_backlog_messages", "s") == 0)
    assert said("keylane_oldest_message_age_seconds", "s") == 0


@pytest.mark.slow
def test_backlog_and_age_of_a_subscription_with_a_filter_are_told(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s", keys="eu-*")
    client.create_subscription(topic, "t")
    client.publish_many(topic, [OutgoingMessage(b"", key=f"eu-{number % 10}") for number in range(20)])

    def said(name: str, subscription: str) -> float:
        return total(served, name, topic=topic, subscription=subscription)

    with client.subscribe(topic, "s", permits=5) as consumer:  # what fits and is not taken is noted by now
        held = [consumer.receive(timeout=SOON) for _ in range(5)]
        wait_until(lambda: said("keylane_pending_messages", "s") == 5)
        wait_until(lambda: said("keylane_backlog_messages", "s") == 15)
        assert said("keylane_oldest_message_age_seconds", "s") > 0
        assert said("keylane_backlog_messages", "t") == 20
        consumer.ack(held)
    assert "ValueError" not in served.log()


@pytest.mark.slow
def test_a_worker_tells_of_its_connections_leases_and_moves(
    served: RunningBroker, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=4)
    wait_until(
        lambda: (
            total(served, "keylane_partition_leases") >= 4
            and total(served, "keylane_partitions_without_lease") == 0
        )
    )
    assert total(served, "keylane_connections") >= 1
    assert total(served, "keylane_connections_accepted_total") >= 1
    assert total(served, "keylane_partition_leases_taken_total") >= 4
    before = total(served, "keylane_partitions_handed_over_total")
    owner = client.partitions(topic)[0].worker
    other = next(name for name in served.ids if name != owner)
    client.move_partition(topic, 0, other)
    wait_until(lambda: total(served, "keylane_partitions_handed_over_total") > before)
    names = {
        sample.labels["worker"] for url in served.http_urls for sample in scrape(url)["keylane_worker_info"]
    }
    assert names == set(served.ids)
    assert httpx.get(f"{served.http_urls[0]}/v1/topics/{topic}x/hot-keys").status_code == 404
    assert total(served, "keylane_errors_total", code="topic_not_found") >= 1


@pytest.mark.slow
async def test_what_goes_wrong_is_counted_by_what_it_is(topic: str) -> None:
    """A partition that another takes, lost connections of either kind, and receipts that are late."""
    with RunningBroker(http=True) as broker, redis.Redis.from_url(broker.redis_url) as connection:
        async with connect(broker.urls[0]) as peer:
            await peer.answer(wire.CreateTopic(topic, 1))
            stream = Stream(peer, topic, "s", "c")
            await stream.open(permits=2)
            await publish(peer, topic, 0, "u1", "u2")
            first, second = await stream.receive(2)
            for _ in range(2):
                await stream.ack(first)
            assert total(broker, "keylane_messages_stale_total", topic=topic, subscription="s") == 1
            await peer.answer(
                wire.Nack(stream.number, 0, delay_ms=0, charged=False), receipts(stream.mode, second)
            )
            assert total(broker, "keylane_messages_released_total", topic=topic) == 1
        assert total(broker, "keylane_redis_reconnects_total") == 0
        connection.execute_command("CLIENT", "KILL", "TYPE", "normal")
        wait_until(lambda: total(broker, "keylane_redis_reconnects_total") > 0)
        with socket.create_connection(("127.0.0.1", broker.settings.port)) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            wait_until(
                lambda: total(broker, "keylane_connections_dropped_total", reason="protocol_error") == 1
            )
        assert total(broker, "keylane_fenced_writes_total") == 0
        engine = Engine.connect(broker.redis_url)
        try:
            connection.delete(partition_keys(topic, 0).lease)
            await engine.acquire(topic, 0, "somebody-else", 1_000)
            async with connect(broker.urls[0]) as peer:
                with suppress(Refused, Elsewhere):
                    await publish(peer, topic, 0, "u3")
            await until(lambda: total(broker, "keylane_fenced_writes_total") > 0)
            assert total(broker, "keylane_partition_leases_lost_total") == 1
        finally:
            await engine.close()


@pytest.mark.slow
def test_a_deleted_topic_is_not_told_of(served: RunningBroker, client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s")
    client.publish(topic, b"")
    assert total(served, "keylane_messages_published_total", topic=topic) == 1
    client.delete_topic(topic)
    wait_until(lambda: not any(topic in httpx.get(f"{url}/metrics").text for url in served.http_urls))


def test_scrapes_lose_nothing_of_topics_that_are_just_made(
    served: RunningBroker, client: Client, topic: str
) -> None:
    done = threading.Event()

    def scrape_on() -> None:
        while not done.is_set():
            scrape_all(served)

    scraping = threading.Thread(target=scrape_on)
    scraping.start()
    try:
        for number in range(10):
            client.create_topic(f"{topic}-{number}", partitions=2)
            client.create_subscription(f"{topic}-{number}", "s")
            client.publish_many(
                f"{topic}-{number}", [OutgoingMessage(partition=place % 2) for place in range(4)]
            )
    finally:
        done.set()
        scraping.join()
    seen = scrape_all(served)
    for number in range(10):
        assert total(seen, "keylane_messages_published_total", topic=f"{topic}-{number}") == 4


def test_open_metrics_is_spoken_to_who_asks_for_it(served: RunningBroker) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    answer = httpx.get(f"{served.http_urls[0]}/metrics", headers={"Accept": accept}, timeout=SOON)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.slow
def test_metrics_need_the_right_to_observe_and_can_be_switched_off() -> None:
    with RunningBroker(http=True, auth=True, admin_token=ADMIN, metrics=False) as broker:
        url = f"{broker.http_urls[0]}/metrics"
        assert httpx.get(url).status_code == 401
        answer = httpx.get(url, headers={"Authorization": f"Bearer {ADMIN}"})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.slow
def test_no_secret_is_in_metrics_or_in_the_log(server_binary: Path, topic: str) -> None:
    """Neither the password of Redis, nor a token, nor what messages have in them."""
    password, canary = "canary-of-redis", "canary-of-a-message"
    with single_server(binary=server_binary) as server:
        ask(server.port, "CONFIG", "SET", "requirepass", password)
        url = server.url.replace("redis://", f"redis://:{password}@")
        with RunningBroker(url, http=True, auth=True, admin_token=ADMIN, log_level="debug") as broker:
            with Client(broker.url, token=ADMIN) as client:
                client.create_topic(topic, partitions=1)
                client.create_subscription(topic, "s")
                token = client.create_token("prometheus", ["observe:*"]).token
                client.publish(topic, canary, key=canary, attributes={"a": canary})
                with client.subscribe(topic, "s") as consumer:
                    consumer.receive(timeout=SOON).nack(delay=0, reason=canary)
            answer = httpx.get(
                f"{broker.http_urls[0]}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=SOON
            )
            assert topic in answer.text
            said = answer.text + broker.log()
    for secret in (password, ADMIN, token, canary):
        assert secret not in said


def families_of(text: str) -> dict[str, str]:
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def names_of(served: RunningBroker) -> dict[str, str]:
    """All names of ours that a sample may have, with its type."""
    found = {}
    for name, kind in families_of(httpx.get(f"{served.http_urls[0]}/metrics").text).items():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
        found.update({name + ending: kind for ending in endings})
    return found


def test_operators_find_all_metrics_in_the_docs_and_no_others(served: RunningBroker) -> None:
    known = {
        name: kind
        for name, kind in families_of(httpx.get(f"{served.http_urls[0]}/metrics").text).items()
        if name.startswith("keylane_")
    }
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    listed = re.findall(r"^\| `(keylane_\w+)` \| (\w+) \|", page, re.MULTILINE)
    expected = {name + ("_total" if kind == "counter" else ""): kind for name, kind in known.items()}
    assert dict(listed) == expected


@pytest.mark.parametrize("file", ["prometheus-rules.yaml", "grafana-dashboard.json"])
def test_rules_and_dashboard_speak_of_metrics_that_exist(served: RunningBroker, file: str) -> None:
    text = (ROOT / "deploy" / file).read_text("utf-8")
    used = set(re.findall(r"\bkeylane_\w+", text))
    assert len(used) > 5
    assert used <= names_of(served).keys()


def test_rules_and_dashboard_are_whole() -> None:
    rules: Any = yaml.safe_load((ROOT / "deploy/prometheus-rules.yaml").read_text("utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["annotations"]["summary"]
    board = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text("utf-8"))
    assert all(panel["targets"] for panel in board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    scraped: Any = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text("utf-8"))
    assert scraped["rule_files"] == ["/etc/prometheus/prometheus-rules.yaml"]
