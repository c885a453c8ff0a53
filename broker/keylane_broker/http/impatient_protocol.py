"""HTTP connections that are closed if they do not get on: a byte now and then only holds a place."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class ImpatientProtocol(H11Protocol):
    """A connection whose next request has to come in time, once it has begun to."""

    patience: float  # seconds for its first lines, and for what is left of one that has been answered
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Expect the rest of a request that has begun."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect()
        else:
            self._stop_expecting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._stop_expecting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._closing is None and not self.transport.is_closing():
            self._closing = self.loop.call_later(self.patience, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def with_patience(seconds: float) -> type[H11Protocol]:
    """Return the protocol of connections that have so many seconds."""
    return type("Protocol", (ImpatientProtocol,), {"patience": seconds})
