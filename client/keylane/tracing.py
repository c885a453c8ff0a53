"""OpenTelemetry, where the application has set it up: spans by the messaging conventions.

A publish is a producer span, whose context travels in the attributes of its messages (`traceparent`). What is
done with a message in its block, or in a handler, is a consumer span with a link to that. An application that
has not imported OpenTelemetry, or set up no provider, pays one look for each publish.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from keylane.errors import BrokerError
from keylane.types import OutgoingMessage, Published

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, Tracer

__all__ = ["Processing", "PublishSpan", "processing", "publish_span", "tracer"]

SYSTEM = "keylane"


class Handled(Protocol):
    """A message, as far as spans tell of it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def attributes(self) -> dict[str, str]: ...


M = TypeVar("M", bound=OutgoingMessage)


def tracer() -> "Tracer | None":
    """Return what makes spans; None where the application has set up nothing of the kind."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_tracer_provider"):  # another thread is just importing it
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return provider.get_tracer(SYSTEM, version("keylane"))  # type: ignore[no-any-return]


class PublishSpan:
    """The span of one publish."""

    def __init__(self, span: "Span") -> None:
        from opentelemetry.propagate import inject

        self._span = span
        self._carrier: dict[str, str] = {}
        inject(self._carrier)

    def stamped(self, message: M) -> M:
        """Return a message that says which publish it is of, unless it says where it comes from itself."""
        if not isinstance(message, OutgoingMessage) or not isinstance(message.attributes, Mapping | None):
            return message  # as it is wrong it is refused
        own = message.attributes or {}
        if "traceparent" in own:
            return message
        return msgspec.structs.replace(message, attributes={**own, **self._carrier})

    def all_stamped(self, messages: Iterable[M]) -> Iterable[M]:
        """Return messages so; a sequence stays one."""
        if isinstance(messages, Sequence):
            self._span.set_attribute("messaging.batch.message_count", len(messages))
            return [self.stamped(message) for message in messages]
        return map(self.stamped, messages)

    def published(self, answer: Published) -> Published:
        """Note where a message is."""
        self._span.set_attribute("messaging.message.id", answer.id or answer.uid)
        self._span.set_attribute("messaging.destination.partition.id", str(answer.partition))
        return answer


@contextmanager
def publish_span(maker: "Tracer", topic: str) -> Iterator[PublishSpan]:
    """Trace a publish; an error that is raised meanwhile is noted."""
    from opentelemetry.trace import SpanKind

    with maker.start_as_current_span(
        f"publish {topic}",
        kind=SpanKind.PRODUCER,
        attributes={
            "messaging.system": SYSTEM,
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
        },
    ) as span:
        try:
            yield PublishSpan(span)
        except BaseException as error:
            span.set_attribute("error.type", _kind_of(error))
            raise


class Processing:
    """The spans of what a consumer's application does with its messages."""

    def __init__(self, maker: "Tracer", subscription: str) -> None:
        self._tracer = maker
        self._subscription = subscription
        self._open: dict[Any, tuple[Span, Any]] = {}  # message -> its span, and how to leave its context

    def begin(self, message: Handled) -> None:
        """The application begins with a message."""
        from opentelemetry import context
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            f"process {message.topic}",
            kind=SpanKind.CONSUMER,
            links=_links(message),
            attributes={
                "messaging.system": SYSTEM,
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": message.topic,
                "messaging.destination.partition.id": str(message.partition),
                "messaging.destination.subscription.name": self._subscription,
                "messaging.consumer.group.name": self._subscription,
                "messaging.message.id": message.id,
                "messaging.message.body.size": message.size,
            },
        )
        self._open[message] = span, context.attach(set_span_in_context(span))

    def end(self, message: Handled, error: BaseException | None) -> None:
        """It has done what it does, or failed."""
        from opentelemetry import context
        from opentelemetry.trace import StatusCode

        if (begun := self._open.pop(message, None)) is None:
            return
        span, token = begun
        if error is not None:
            span.set_attribute("error.type", _kind_of(error))
            span.record_exception(error)
            span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        context.detach(token)
        span.end()


def processing(subscription: str) -> Processing | None:
    """Return how a new consumer traces what becomes of its messages; None if it does not."""
    maker = tracer()
    return None if maker is None else Processing(maker, subscription)


def _links(message: Handled) -> "list[Link]":
    from opentelemetry.propagate import extract
    from opentelemetry.trace import Link, get_current_span

    attributes = message.attributes
    if "traceparent" not in attributes:
        return []
    origin = get_current_span(extract(attributes)).get_span_context()
    return [Link(origin)] if origin.is_valid else []


def _kind_of(error: BaseException) -> str:
    return error.code if isinstance(error, BrokerError) else type(error).__qualname__
