"""Ports to listen on: which are free, and what to say of one that is not."""

import contextlib
import errno
import random
import socket
from collections.abc import Collection, Iterable

from keylane.wire import address_of
from keylane_broker.errors import AddressInUse, ServerError

__all__ = ["check_free", "choose_ports", "free_port", "listening_failed"]

# Below those that kernels give to outgoing connections, so that none of these can take ours between a kill
# and a restart.
PORTS = range(10_000, 32_768)


def choose_ports(first: int, count: int, taken: Collection[int] = ()) -> list[int]:
    """Return the port of each worker: from `first` on, or free ones, and none of `taken`, where that is 0."""
    if first:
        return list(range(first, first + count))
    # Chosen here and not by the system at each start: clients come back to the ports they know.
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        if (port := free_port()) not in taken:
            chosen[port] = None
    return list(chosen)


def free_port() -> int:
    """Pick a port of this machine that nothing listens on just now."""
    # From the system's randomness, because test runners like to seed every worker's generator alike.
    choose = random.SystemRandom().choice
    while True:
        port = choose(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def check_free(host: str, ports: Iterable[int], flag: str = "--port") -> None:
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
            raise failure(listening_failed(host, port, error, flag)) from None


def listening_failed(host: str, port: int, error: OSError, flag: str = "--port") -> str:
    """Say what happened, and what to do."""
    where = address_of(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; stop what listens there or choose another port with {flag}"
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {where}: {reason}; --host is an address of this machine, 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"cannot listen on {where}: {reason}; choose a port from 1024 on with {flag}"
    return f"cannot listen on {where}: {reason}"
