"""The settings of topics and subscriptions: checked, and as they are stored."""

import math

from keylane.errors import InvalidArgument
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Backoff, SubscriptionSettings, TopicSettings
from keylane_broker.limits import MAX_JOURNAL, MAX_MS, MAX_PARTITIONS

MODES = ("shared", "key_shared", "exclusive", "failover", "cursor")
DELIVERIES = ("at_least_once", "at_most_once")


def check_topic_settings(settings: TopicSettings) -> None:
    """Raise InvalidArgument for settings that a topic cannot have."""
    check_int("partitions", settings.partitions, 1, MAX_PARTITIONS)
    check_int("dedupe_ms", settings.dedupe_ms, 0, MAX_MS)
    if type(settings.retain) is not bool:
        raise InvalidArgument(f"retain is {settings.retain!r:.60}: use True or False")
    check_int("journal", settings.journal, 0, MAX_JOURNAL)


def topic_fields(settings: TopicSettings) -> dict[str, str]:
    """Return settings as they are stored."""
    return {
        "partitions": str(settings.partitions),
        "retain": str(int(settings.retain)),
        "dedupe_ms": str(settings.dedupe_ms),
        "journal": str(settings.journal),
    }


def topic_settings(stored: dict[str, str]) -> TopicSettings:
    """Return settings out of what is stored."""
    return TopicSettings(
        int(stored["partitions"]),
        stored["retain"] == "1",
        int(stored["dedupe_ms"]),
        int(stored["journal"]),
        int(stored["incarnation"]),
    )


def check_subscription_settings(settings: SubscriptionSettings) -> None:
    """Raise InvalidArgument for settings that a subscription cannot have."""
    if settings.mode not in MODES:
        raise InvalidArgument(f"mode {settings.mode!r:.60}: use one of {', '.join(MODES)}")
    if settings.delivery not in DELIVERIES:
        raise InvalidArgument(f"delivery {settings.delivery!r:.60}: use one of {', '.join(DELIVERIES)}")
    if (settings.mode, settings.delivery) == ("cursor", "at_most_once"):
        raise InvalidArgument("mode cursor does not deliver, so at_most_once does not apply")
    check_int("lease_ms", settings.lease_ms, 1, MAX_MS)
    backoff = settings.backoff
    if backoff is not None and not (
        all(math.isfinite(part) for part in (backoff.initial, backoff.factor, backoff.maximum))
        and 0 <= backoff.initial <= backoff.maximum <= MAX_MS / 1000
        and backoff.factor >= 1
        and 0 <= backoff.jitter <= 1
    ):
        raise InvalidArgument(
            f"{backoff} needs 0 <= initial <= maximum <= {MAX_MS // 1000}, factor >= 1 and 0 <= jitter <= 1"
        )


def subscription_fields(settings: SubscriptionSettings) -> dict[str, str]:
    """Return settings as they are stored."""
    backoff = settings.backoff
    text = ""
    if backoff is not None:
        text = f"{backoff.initial * 1000:.0f} {backoff.factor} {backoff.maximum * 1000:.0f} {backoff.jitter}"
    return {
        "mode": settings.mode,
        "delivery": settings.delivery,
        "lease_ms": str(settings.lease_ms),
        "backoff": text,
    }


def subscription_settings(stored: dict[str, str]) -> SubscriptionSettings:
    """Return settings out of what is stored."""
    backoff = None
    if stored["backoff"]:
        initial, factor, maximum, jitter = map(float, stored["backoff"].split())
        backoff = Backoff(initial / 1000, factor, maximum / 1000, jitter)
    return SubscriptionSettings(stored["mode"], stored["delivery"], int(stored["lease_ms"]), backoff)
