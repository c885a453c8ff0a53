"""Keeps web pages out where no token is needed: any page can make the browser of who visits it send requests.

A browser says which site a request is for: in Sec-Fetch-Site, and in Origin where something may change. A
page whose name was made to mean this machine is of the same site to it, but then that name is in Host.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from keylane.errors import Forbidden
from keylane_broker.config import Settings, is_loopback

Hosts = frozenset[str] | None  # names by which a broker is called; None: any


def hosts_of(settings: Settings) -> Hosts:
    """Return the names by which a broker is called; one that listens not only here may have any."""
    if not is_loopback(settings.host):
        return None
    return frozenset(filter(None, ("localhost", settings.host.lower(), _name(settings.advertise))))


def check_site(headers: Headers, hosts: Hosts) -> None:
    """Raise Forbidden for a request that a page of another site has made a browser send."""
    host, origin = headers.get("host", ""), headers.get("origin")
    site = headers.get("sec-fetch-site")
    if site is None and origin is not None:
        site = "same-origin" if origin.partition("://")[2] == host else "cross-site"
    if site not in (None, "same-origin", "none"):
        raise Forbidden(
            "the request is from a page of another site, which is refused where no token is needed (--auth)"
        )
    name = _name(host)
    if hosts is not None and host and not (name in hosts or name.endswith(".localhost") or _is_ip(name)):
        raise Forbidden(
            f"this broker is not called {host!r:.60}: use localhost, or start it with --advertise"
        )


def _name(address: str) -> str:
    try:
        return (urlsplit(f"//{address}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_ip(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
