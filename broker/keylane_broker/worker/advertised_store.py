"""Which payload store clients are told of: the one in which bodies are, or the workers in front of it."""

from keylane.payloads import has_password, is_http
from keylane_broker.config import Settings


def stored_in(settings: Settings, redis_url: str) -> str:
    """Return the URL of the store in which bodies are, as only workers need to know it."""
    return settings.payloads if settings.payloads and not is_http(settings.payloads) else redis_url


def advertised(settings: Settings, redis_url: str) -> str:
    """Return the URL that INFO has, "" for none.

    It is that of the workers where clients should not have the one of Redis, or could not reach it. Nobody
    who needs a token is told where Redis is, and nobody whom the broker does not know a password.
    """
    if settings.payloads:
        return settings.payloads
    unreachable = bool(settings.advertise) and not settings.redis  # the embedded server is on loopback
    secret = has_password(redis_url)
    if settings.http_port and (settings.auth or unreachable or secret):
        return "keylane+https://" if settings.tls_cert else "keylane+http://"
    if settings.auth or (secret and not settings.tls_client_ca):  # who reaches Redis may do anything there
        return ""
    return redis_url
