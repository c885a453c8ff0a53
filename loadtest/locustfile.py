"""Locust users that drive a broker through the real client: producers and consumers of one topic.

    locust -f loadtest/locustfile.py                                     # with the web page, on port 8089
    locust -f loadtest/locustfile.py --headless -u 20 -r 20 -t 60s ProducerUser ConsumerUser

The environment says what is driven: KEYLANE_SERVER (default keylane://127.0.0.1:9999), KEYLANE_LOAD_TOPIC
(load), KEYLANE_LOAD_BODY (bytes of a body, 100) and KEYLANE_LOAD_KEYS (how many keys there are, 1000).
"""

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TypeVar

from gevent import monkey  # type: ignore[import-untyped]
from gevent.threadpool import ThreadPool  # type: ignore[import-untyped]
from locust import User, constant, task
from locust.exception import StopUser

from keylane import BrokerError, Client

SWITCH = "LOCUST_SKIP_MONKEY_PATCH"

if monkey.is_module_patched("threading") and SWITCH not in os.environ:
    # Locust makes greenlets of all threads as soon as it is imported. The client runs an event loop in a
    # thread of its own, which as a greenlet would hold up every other for ever. Locust has a switch for
    # that, but reads it before any locustfile: start over with it on. Its own greenlets work all the same,
    # and what blocks is given to real threads below.
    os.execve(sys.executable, [sys.executable, "-m", "locust", *sys.argv[1:]], {**os.environ, SWITCH: "1"})

SERVER = os.environ.get("KEYLANE_SERVER", "keylane://127.0.0.1:9999")
TOPIC = os.environ.get("KEYLANE_LOAD_TOPIC", "load")
BODY = int(os.environ.get("KEYLANE_LOAD_BODY", "100"))
KEYS = int(os.environ.get("KEYLANE_LOAD_KEYS", "1000"))
SUBSCRIPTION = "load"
IDLE_SECONDS = 0.2  # that a consumer waits for a message before it looks whether it should stop

T = TypeVar("T")


class KeylaneUser(User):
    """A user with a client of its own, whose calls run in a real thread of its own."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        """Connect; a user that cannot is a failure in the statistics, and stops."""
        self._thread = ThreadPool(1)
        self._opened = ExitStack()
        began = time.perf_counter()
        try:
            self.in_thread(self.open)
        except BrokerError as error:
            self.report("connect", SERVER, time.perf_counter() - began, 0, error)
            raise StopUser from error

    def on_stop(self) -> None:
        """Let go of everything; what was under way in the thread ends first."""
        self.in_thread(self._opened.close)
        self._thread.kill()

    def open(self) -> None:
        """Connect, and make sure that there is something to publish to and to consume from."""
        self.client = self._opened.enter_context(Client(SERVER))
        self.client.create_topic(TOPIC, exist_ok=True)
        self.client.create_subscription(TOPIC, SUBSCRIPTION, mode="key_shared", exist_ok=True)

    def in_thread(self, work: Callable[[], T]) -> T:
        """Wait for work in the user's thread, while other users go on."""
        result: T = self._thread.apply(work)
        return result

    def report(
        self, kind: str, name: str, seconds: float, size: int, error: BrokerError | None = None
    ) -> None:
        """Put a latency or a failure into Locust's statistics."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1_000,
            response_length=size,
            exception=error,
            context=self.context(),
        )


class ProducerUser(KeylaneUser):
    """Publishes one message after the other, each confirmed."""

    @task
    def publish(self) -> None:
        """Publish a message under a random key; its latency is until the broker has stored it."""
        key, body = f"key-{random.randrange(KEYS)}", random.randbytes(BODY)
        began, error = time.perf_counter(), None
        try:
            self.in_thread(lambda: self.client.publish(TOPIC, body, key=key))
        except BrokerError as raised:
            error = raised
        self.report("publish", TOPIC, time.perf_counter() - began, len(body), error)


class ConsumerUser(KeylaneUser):
    """Consumes what there is and acks it."""

    def open(self) -> None:
        """Connect, and open a consumer."""
        super().open()
        self.consumer = self._opened.enter_context(
            self.client.subscribe(TOPIC, SUBSCRIPTION, mode="key_shared")
        )

    @task
    def consume(self) -> None:
        """Receive and ack a message; its latency is from the producer's call until its body is here."""
        try:
            delivered = self.in_thread(self._receive)
        except BrokerError as error:
            self.report("deliver", TOPIC, 0.0, 0, error)
            return
        if delivered is not None:
            self.report("deliver", TOPIC, *delivered)

    def _receive(self) -> tuple[float, int] | None:
        """The latency and size of the next message, None if there is none for now."""
        try:
            message = self.consumer.receive(timeout=IDLE_SECONDS)
        except TimeoutError:
            return None
        with message:
            body = message.data()
            # Producers on other machines have other clocks, which may be ahead of this one.
            latency = (datetime.now(UTC) - message.produced_at).total_seconds()
        return max(0.0, latency), len(body)
