"""The server of the HTTP port: it leaves signals to the worker, and a TLS handshake has only so long."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn


class ImpatientServer(uvicorn.Server):
    """One that listens by itself, since that of uvicorn lets a handshake take a minute."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, *, patience: float) -> None:
        """`patience` is in seconds; without a context there is no TLS."""
        super().__init__(config)
        self._context = context
        self._patience = None if context is None else patience

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets; shutdown() closes them."""
        await super().startup(sockets=[])
        make = partial(  # type: ignore[call-arg]
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listener in sockets or ():
            self.servers.append(
                await asyncio.get_running_loop().create_server(
                    make,
                    sock=listener,
                    backlog=self.config.backlog,
                    ssl=self._context,
                    ssl_handshake_timeout=self._patience,
                )
            )
