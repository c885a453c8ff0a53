"""TLS of a broker's ports, from the files that the settings name; read anew when a worker is restarted."""

import ssl
from typing import Any

from keylane_broker.config import Settings
from keylane_broker.errors import ServerError

__all__ = ["own_context", "server_context"]


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """Return what a port speaks TLS with, None for none; ServerError says what is wrong with a file."""
    if settings.tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(
            f"{name} {path}"
            for name in ("tls_cert", "tls_key", "tls_client_ca")
            if (path := getattr(settings, name)) is not None
        )
        raise ServerError(f"TLS cannot be set up with {files}: {error}") from None
    return context


def own_context(settings: Settings) -> ssl.SSLContext | None:
    """Return what a worker is a client of its own cluster with."""
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context()
    context.load_verify_locations(settings.tls_cert)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # see _Connection
    own = ssl.PEM_cert_to_DER_cert(_first(settings.tls_cert.read_text()))
    context.sslobject_class = type("OwnConnection", (_Connection,), {"own": own})
    return context


class _Connection(ssl.SSLObject):
    """A connection to a worker, which has our own certificate, or one for the host at which it is.

    They may share one that is good only for the name that is advertised, and yet connect by address.
    """

    own: bytes

    def do_handshake(self) -> None:
        """Raise unless it is a worker of ours at the other end, before it is told anything."""
        super().do_handshake()
        if self.getpeercert(True) == self.own:
            return
        said: Any = self.getpeercert() or {}
        host = self.server_hostname or ""
        if not any(_matches(str(name), host) for _, name in said.get("subjectAltName", ())):
            raise ssl.SSLCertVerificationError(
                1, f"at {host} is a certificate that is neither ours nor good for it"
            )


def _matches(name: str, host: str) -> bool:
    """Whether a name in a certificate stands for a host."""
    name, host = name.lower(), host.lower().strip("[]")
    return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:] != "")


def _first(certificates: str) -> str:
    """Return the first of several, PEM, which may stand behind a key."""
    begin = certificates.index(ssl.PEM_HEADER)
    return certificates[begin : certificates.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)]
