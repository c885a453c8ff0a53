"""OpenTelemetry: spans of publishes and of what is done with messages, collected by the SDK's exporter."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from keylane import AsyncClient, Client, OutgoingMessage, SyncMessage, TopicNotFound, tracing
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

SOON = 60.0


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an application that traces has set up; here not for the whole process, which has other tests."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def client(broker: RunningBroker, topic: str) -> Iterator[Client]:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "billing")
        yield client


def of_kind(spans: InMemorySpanExporter, kind: SpanKind) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.kind is kind]


def is_linked(consumer: ReadableSpan, producer: ReadableSpan) -> bool:
    [link] = consumer.links
    assert producer.context is not None
    origin = (link.context.trace_id, link.context.span_id)
    return origin == (producer.context.trace_id, producer.context.span_id)


async def test_a_message_is_traced_from_the_publish_to_its_block(
    broker: RunningBroker, topic: str, spans: InMemorySpanExporter
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        tracer = trace.get_tracer_provider().get_tracer("application")
        async with client.subscribe(topic, "billing") as consumer:
            with tracer.start_as_current_span("order") as order:
                published = await client.publish(topic, b"42", attributes={"region": "eu"})
            message = await consumer.receive(timeout=SOON)
            assert message.attributes["region"] == "eu"
            async with message:
                with tracer.start_as_current_span("charge") as charge:
                    pass
    [sent] = of_kind(spans, SpanKind.PRODUCER)
    [processed] = of_kind(spans, SpanKind.CONSUMER)
    assert sent.context is not None
    assert processed.context is not None
    assert sent.name == f"publish {topic}"
    assert sent.parent is not None
    assert sent.parent.span_id == order.get_span_context().span_id
    assert sent.attributes == {
        "messaging.system": "keylane",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.message.id": published.id,
    }
    traceparent = message.attributes["traceparent"]
    assert traceparent.split("-")[1:3] == [f"{sent.context.trace_id:032x}", f"{sent.context.span_id:016x}"]
    assert processed.name == f"process {topic}"
    assert is_linked(processed, sent)
    assert processed.attributes is not None
    assert processed.attributes["messaging.message.id"] == published.id
    assert processed.attributes["messaging.consumer.group.name"] == "billing"
    assert processed.attributes["messaging.message.body.size"] == 2
    assert processed.status.status_code is StatusCode.UNSET
    inner = next(span for span in spans.get_finished_spans() if span.name == "charge")
    assert inner.parent is not None
    assert inner.parent.span_id == processed.context.span_id
    assert charge.get_span_context().trace_id == processed.context.trace_id


def test_a_block_that_fails_is_an_error_and_a_message_keeps_a_traceparent_of_its_own(
    client: Client, topic: str, spans: InMemorySpanExporter
) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.publish(topic, attributes={"traceparent": own})
    with client.subscribe(topic, "billing") as consumer:
        message = consumer.receive(timeout=SOON)
        assert message.attributes == {"traceparent": own}
        with pytest.raises(RuntimeError), message:
            raise RuntimeError("no")
    [processed] = of_kind(spans, SpanKind.CONSUMER)
    assert processed.attributes is not None
    assert processed.attributes["error.type"] == "RuntimeError"
    assert processed.status.status_code is StatusCode.ERROR
    assert [event.name for event in processed.events] == ["exception"]
    [link] = processed.links
    assert f"{link.context.span_id:016x}" == "b7ad6b7169203331"
    assert not trace.get_current_span().get_span_context().is_valid


def test_messages_of_a_batch_link_to_its_span_from_handlers_in_threads_too(
    client: Client, topic: str, spans: InMemorySpanExporter
) -> None:
    seen: list[bool] = []

    def handle(message: SyncMessage) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    client.publish_many(topic, [OutgoingMessage(key="a"), OutgoingMessage(attributes={"n": "2"})])
    with client.subscribe(topic, "billing", handler=handle):
        wait_until(lambda: len(of_kind(spans, SpanKind.CONSUMER)) == 2)
    [sent] = of_kind(spans, SpanKind.PRODUCER)
    assert sent.attributes is not None
    assert sent.attributes["messaging.batch.message_count"] == 2
    assert all(is_linked(span, sent) for span in of_kind(spans, SpanKind.CONSUMER))
    assert seen == [True, True]


def test_a_publish_that_fails_is_an_error(client: Client, topic: str, spans: InMemorySpanExporter) -> None:
    with pytest.raises(TopicNotFound):
        client.publish(f"{topic}-not")
    [sent] = of_kind(spans, SpanKind.PRODUCER)
    assert sent.attributes is not None
    assert sent.attributes["error.type"] == "topic_not_found"
    assert sent.status.status_code is StatusCode.ERROR


def test_without_a_provider_nothing_is_added(client: Client, topic: str) -> None:
    client.publish(topic)
    client.publish_many(topic, [OutgoingMessage(attributes={"a": "b"})])
    with client.subscribe(topic, "billing") as consumer:
        assert [consumer.receive(timeout=SOON).attributes for _ in range(2)] == [{}, {"a": "b"}]


def test_who_does_not_use_it_does_not_import_it() -> None:
    script = (
        "import sys, keylane; from keylane import AsyncClient, Client, tracing; "
        "print(tracing.tracer(), any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"


def test_while_it_is_being_imported_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("opentelemetry.trace")  # as another thread leaves it for a moment
    half.ProxyTracerProvider = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", half)
    assert tracing.tracer() is None
