"""The addresses that workers listen on: which they are, whether they are free, and what to say if not."""

import errno
import socket
from collections.abc import Iterable

from keylane.wire import address_of
from keylane_broker.config import Settings
from keylane_broker.supervise.embedded_server import AddressInUse, ServerError, free_port

__all__ = ["check_free", "listening_failed", "ports_of"]


def ports_of(settings: Settings) -> list[int]:
    """The port of each worker."""
    if settings.port:
        return list(range(settings.port, settings.port + settings.workers))
    # Chosen here and not by the system at each start: clients come back to the ports they know.
    chosen: dict[int, None] = {}
    while len(chosen) < settings.workers:
        chosen[free_port()] = None
    return list(chosen)


def check_free(host: str, ports: Iterable[int]) -> None:
    """Raise ServerError where nobody could listen now, so that nothing is started in vain."""
    for port in ports:
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(address)
        except OSError as error:
            failure = AddressInUse if error.errno == errno.EADDRINUSE else ServerError
            raise failure(listening_failed(host, port, error)) from None


def listening_failed(host: str, port: int, error: OSError) -> str:
    """What happened, and what to do."""
    where = address_of(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; stop what listens there or choose another port with --port"
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {where}: {reason}; --host is an address of this machine, 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"cannot listen on {where}: {reason}; choose a port from 1024 on with --port"
    return f"cannot listen on {where}: {reason}"
