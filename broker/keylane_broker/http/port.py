"""The HTTP port of a worker."""

import asyncio
import contextlib
import logging
import socket
from importlib.metadata import version

from keylane import AsyncClient
from keylane_broker.config import Settings
from keylane_broker.errors import ServerError
from keylane_broker.ports import listening_failed
from keylane_broker.tls import own_context, server_context
from keylane_broker.worker.worker import Worker

__all__ = ["HttpPort"]

_IDLE = 75  # seconds that a connection without requests is kept
_LAST = 2  # seconds for what is being answered when it closes


class HttpPort:
    """Serves HTTP for a worker from open() to close(), unless that is switched off."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        self._settings = settings
        self._worker = worker
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Begin to serve, on behalf of a worker that serves."""
        if self._settings.http_port:
            await self._open()

    async def _open(self) -> None:
        # What takes a quarter of a second to import.
        import uvicorn

        from keylane_broker.http.app import application
        from keylane_broker.http.health import health_routes
        from keylane_broker.http.homes import Homes
        from keylane_broker.http.impatient_protocol import MAX_HEADERS, protocol_of
        from keylane_broker.http.impatient_server import ImpatientServer
        from keylane_broker.http.leasing import Leasing
        from keylane_broker.http.live_requests import LiveRequests
        from keylane_broker.http.metrics import Metrics
        from keylane_broker.http.other_sites import hosts_of
        from keylane_broker.http.room import Room

        settings, worker, stack = self._settings, self._worker, self._stack
        listener = stack.enter_context(_listen(settings.host, settings.http_port))
        client = await stack.enter_async_context(self._client())
        leasing = Leasing(client, worker.id)
        patience = settings.heartbeat * 6
        homes = Homes(worker.membership, own_context(settings), patience=patience)
        stack.callback(homes.close)
        live = LiveRequests(worker.access)
        release = version("keylane")
        metrics = Metrics(worker, release, on=settings.metrics)
        stack.callback(metrics.close)
        app = application(
            client,
            leasing,
            homes,
            worker.access,
            metrics.scrape,
            version=release,
            room=Room(
                max_content=int(settings.max_frame),
                max_inflight=int(settings.max_inflight_bytes),
                patience=patience,
            ),
            live=live,
            hosts=hosts_of(settings),
            rates=worker.rates,
            health=health_routes(worker),
        )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of garbage, which anybody can send
        beginning = settings.heartbeat * 3  # seconds for a handshake, and for the first lines of a request
        server = ImpatientServer(
            uvicorn.Config(
                app,
                http=protocol_of(patience=beginning, most=settings.max_connections),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=_IDLE,
                h11_max_incomplete_event_size=MAX_HEADERS,
                timeout_graceful_shutdown=_LAST,
            ),
            server_context(settings),
            patience=beginning,
        )
        sweeping = asyncio.create_task(leasing.run())
        looking = asyncio.create_task(live.run())
        closing = asyncio.create_task(homes.run())
        running = asyncio.create_task(server.serve(sockets=[listener]))

        async def close() -> None:
            server.should_exit = True
            sweeping.cancel()
            looking.cancel()
            closing.cancel()
            await leasing.close()  # which ends those who wait for messages
            await asyncio.gather(running, sweeping, looking, closing, return_exceptions=True)

        stack.push_async_callback(close)

    def _client(self) -> AsyncClient:
        tls = own_context(self._settings)
        client = AsyncClient(
            f"keylane{'s' if tls else ''}://{self._worker.local_address}",
            token=self._worker.access.own_token,
            tls=tls,
        )
        client._bodies.pin(self._worker.payloads)  # others are told to come here
        return client

    async def close(self) -> None:
        """Answer what was asked, and serve no more."""
        await self._stack.aclose()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1_024)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise ServerError(listening_failed(host, port, error, "--http-port")) from None
