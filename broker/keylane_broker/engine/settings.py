"""The settings of topics and subscriptions: checked, and as they are stored."""

import math

from keylane.errors import InvalidArgument, InvalidName
from keylane.wire import MAX_INLINE
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.filters import check_filter, parse_filter
from keylane_broker.engine.values import Backoff, SubscriptionSettings, TopicSettings
from keylane_broker.limits import (
    FOREVER,
    MAX_BYTES,
    MAX_JOURNAL,
    MAX_MS,
    MAX_PARTITIONS,
    MAX_RETRIES,
    MAX_SPREAD,
)
from keylane_broker.store.keys import check_name

MODES = ("shared", "key_shared", "exclusive", "failover", "multicast", "cursor")
DELIVERIES = ("at_least_once", "at_most_once")
POISONS = ("skip", "park")


def check_topic_settings(settings: TopicSettings) -> None:
    """Raise InvalidArgument for settings that a topic cannot have."""
    check_int("partitions", settings.partitions, 1, MAX_PARTITIONS)
    check_int("dedupe_ms", settings.dedupe_ms, 0, MAX_MS)
    check_int("retention_ms", settings.retention_ms, FOREVER, MAX_MS)
    check_int("retention_bytes", settings.retention_bytes, 0, MAX_BYTES)
    check_int("journal", settings.journal, 0, MAX_JOURNAL)
    check_int("ttl_ms", settings.ttl_ms, 0, MAX_MS)
    check_int("backlog_quota", settings.backlog_quota, 0, MAX_BYTES)
    check_int("backlog_quota_bytes", settings.backlog_quota_bytes, 0, MAX_BYTES)
    check_int("spread", settings.spread, 1, MAX_SPREAD)
    check_int("inline", settings.inline, 0, MAX_INLINE)


def topic_fields(settings: TopicSettings) -> dict[str, str]:
    """Return settings as they are stored."""
    return {
        "partitions": str(settings.partitions),
        "retain": _retain(settings.retention_ms, settings.retention_bytes),
        "dedupe_ms": str(settings.dedupe_ms),
        "journal": str(settings.journal),
        "ttl_ms": str(settings.ttl_ms),
        "quota": _quota(settings.backlog_quota, settings.backlog_quota_bytes),
        "spread": str(settings.spread),
        "inline": str(settings.inline),
    }


def partition_fields(settings: TopicSettings) -> dict[str, str]:
    """Return settings as each partition has them: its share of what all may have together."""
    fields = topic_fields(settings)
    del fields["partitions"], fields["spread"], fields["inline"]
    share = -(-settings.retention_bytes // settings.partitions)
    messages = -(-settings.backlog_quota // settings.partitions)
    most_bytes = -(-settings.backlog_quota_bytes // settings.partitions)
    return {
        **fields,
        "retain": _retain(settings.retention_ms, share),
        "quota": _quota(messages, most_bytes),
    }


def _quota(messages: int, most_bytes: int) -> str:
    """Return how much may be unsettled as scripts read it; lua/lib/quota.lua has the format."""
    return f"{messages} {most_bytes}" if most_bytes else str(messages)


def _retain(ms: int, most_bytes: int) -> str:
    """Return what is retained as scripts read it; lua/lib/retention.lua has the format."""
    if not most_bytes and ms in (0, FOREVER):
        return "1" if ms else "0"
    return f"{ms if ms > 0 else '-'} {most_bytes or '-'}"


def _retention(text: str) -> tuple[int, int]:
    """Return for how long and how many bytes are retained, from what is stored."""
    if text in ("0", "1"):
        return (FOREVER if text == "1" else 0), 0
    ms, most_bytes = text.split()
    return int(ms.replace("-", "0")), int(most_bytes.replace("-", "0"))


def topic_settings(stored: dict[str, str]) -> TopicSettings:
    """Return settings out of what is stored."""
    messages, _, most_bytes = stored.get("quota", "0").partition(" ")
    return TopicSettings(
        int(stored["partitions"]),
        int(stored["dedupe_ms"]),
        int(stored["journal"]),
        *_retention(stored["retain"]),
        int(stored.get("ttl_ms", 0)),
        int(messages),
        int(most_bytes or 0),
        int(stored.get("spread", 1)),
        int(stored.get("inline", 0)),
        incarnation=int(stored["incarnation"]),
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
    check_filter(settings.filter)
    if settings.mode == "cursor" and settings.filter.text:
        raise InvalidArgument("mode cursor reads every message by its position: keys and filter do not apply")
    _check_retries(settings)
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


def _check_retries(settings: SubscriptionSettings) -> None:
    """Raise InvalidArgument for what cannot become of messages that fail too often."""
    if settings.max_retries is not None:
        check_int("max_retries", settings.max_retries, 0, MAX_RETRIES)
    if settings.dead_letter:
        check_name("topic", settings.dead_letter)
    if settings.poison not in POISONS:
        raise InvalidArgument(f"poison {settings.poison!r:.60}: use one of {', '.join(POISONS)}")
    if settings.poison == "park" and settings.mode in ("shared", "multicast"):
        raise InvalidArgument(
            f"poison is park: in mode {settings.mode} there is no lane that could stop, use skip"
        )


def check_dead_letter(topic: str, settings: SubscriptionSettings) -> None:
    """Raise InvalidArgument where what fails too often in a subscription of a topic has nowhere to go."""
    if settings.dead_letter == topic:
        raise InvalidArgument(
            f"dead_letter is {topic!r:.60}, the topic itself: what fails would come back without end; "
            "use another topic"
        )
    if settings.max_retries is not None and not settings.dead_letter:
        try:
            check_name("topic", f"{topic}.dead")
        except InvalidName:
            raise InvalidArgument(
                f"max_retries without dead_letter: the name of topic {topic!r:.60} is too long for "
                "'<topic>.dead': name another topic with dead_letter"
            ) from None


def next_topic(topic: str, settings: SubscriptionSettings) -> str | None:
    """Return where messages go by themselves that fail too often in a subscription, None if they do not."""
    if settings.max_retries is None or settings.poison == "park":
        return None
    return settings.dead_letter or f"{topic}.dead"


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
        "filter": settings.filter.text,
        "max_retries": "" if settings.max_retries is None else str(settings.max_retries),
        "dead_letter": settings.dead_letter,
        "poison": settings.poison,
    }


def subscription_settings(stored: dict[str, str]) -> SubscriptionSettings:
    """Return settings out of what is stored."""
    backoff = None
    if stored["backoff"]:
        initial, factor, maximum, jitter = map(float, stored["backoff"].split())
        backoff = Backoff(initial / 1000, factor, maximum / 1000, jitter)
    most = stored.get("max_retries")
    return SubscriptionSettings(
        stored["mode"],
        stored["delivery"],
        int(stored["lease_ms"]),
        backoff,
        int(most) if most else None,
        stored.get("dead_letter", ""),
        stored.get("poison", "skip"),
        parse_filter(stored.get("filter", "")),
    )
