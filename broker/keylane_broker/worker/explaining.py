"""Says what becomes of a message for a subscription, and what would make it move, in one sentence."""

from datetime import UTC, datetime

from keylane import wire
from keylane_broker.engine.messages import Whereabouts
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.partitions import Partitions

_OVER = {
    "settled": "it is settled: acked, skipped, or delivered at most once",
    "deleted": "it was deleted before it was delivered",
    "not_subscribed": "it was published before the subscription began, or a seek has passed it: "
    "if the topic still has it, a seek back to it delivers it",
    "never_existed": "there never was such a message, or nothing is known of it any more",
    "filtered": "the subscription's filter does not match it: publish it anew with what that asks for, "
    "or make a subscription with another filter",
    "expired": "its time to live was over before anybody had it: publish it anew",
}


def explanation(
    partitions: Partitions, topic: str, subscription: str, partition: int, found: Whereabouts, now_ms: int
) -> wire.ExplainReply:
    """Return what is known of a message, with what this worker knows of its consumers."""
    here = partitions.by_place.get((topic, partition))
    dispatcher = here.dispatchers.get(subscription) if here is not None and here.current_lease else None
    ahead = f"{partition}:{found.ahead}" if found.ahead else ""
    return wire.ExplainReply(
        found.state,
        _reason(found, ahead, dispatcher, now_ms),
        found.id and f"{partition}:{found.id}",
        found.key,
        found.uid,
        found.consumer,
        max(0, found.at_ms) if found.state in ("leased", "waiting", "delayed") else 0,
        found.retries,
        ahead,
        found.dead_topic if found.state == "dead_lettered" else "",
        found.dead_id,
    )


def _reason(found: Whereabouts, ahead: str, dispatcher: Dispatcher | None, now_ms: int) -> str:
    if found.state == "settled":
        return _settled(found)
    if found.state in _OVER:
        return _OVER[found.state]
    if found.state == "dead_lettered":
        return _letter(found)
    if found.state == "parked":
        where = (
            f"it waits behind {ahead}, at which its lane is parked" if ahead else "its lane is parked at it"
        )
        return f"{where} ({found.why}): resume the lane, skip that message, or redrive it"
    if found.state == "delayed":
        return f"it is delayed until {_time(found.at_ms)}"
    before = f", retry {found.retries}" if found.retries else ""
    if found.state == "leased":
        until = f"{_time(found.at_ms)} unless it extends that{before}"
        return f"it is delivered: consumer {found.consumer!r} has it until {until}"
    if found.state == "fresh":
        behind = f", behind {found.fresh} other{'s' * (found.fresh > 1)}" if found.fresh else ""
        behind += f", first {ahead} of its lane" if ahead else ""
        return f"it was not delivered yet{behind}: {_obstacle(found, dispatcher)}"
    if ahead:
        whose = f", which consumer {found.ahead_consumer!r} has" if found.ahead_consumer else ""
        return f"it waits behind {ahead} of its lane{whose}{before}: {_due(found, dispatcher, now_ms)}"
    again = " again" if found.retries else ""
    return f"it waits to be delivered{again}{before}: {_due(found, dispatcher, now_ms)}"


def _letter(found: Whereabouts) -> str:
    """Return where a dead letter is."""
    if found.dead_id:
        return f"it had no retry left, and is dead letter {found.dead_id} of {found.dead_topic!r}: redrive it"
    if found.handing:
        return f"it had no retry left, and is being handed over to the dead-letter topic {found.dead_topic!r}"
    went = f"it had no retry left, and went to the dead-letter topic {found.dead_topic!r}"
    return f"{went}: redrive it, unless it has gone from there since, redriven or purged"


def _settled(found: Whereabouts) -> str:
    """Return how it may have been settled."""
    said = _OVER["settled"]
    if found.letter:
        said += "; or it was a dead letter, and that was redriven, under another id, or purged"
    if found.chosen and not found.uid:
        said += "; or the subscription's filter did not match it"
    return said


def _due(found: Whereabouts, dispatcher: Dispatcher | None, now_ms: int) -> str:
    if found.at_ms > now_ms:
        return f"that is due at {_time(found.at_ms)}"
    return _obstacle(found, dispatcher)


def _obstacle(found: Whereabouts, dispatcher: Dispatcher | None) -> str:
    """Return why nobody gets what could be delivered; a worker that does not serve it knows less."""
    if found.mode == "cursor":
        return "its reader has not committed it"
    if found.paused:
        return "the subscription is paused"
    if not found.sessions:
        return "no consumer is connected"
    if dispatcher is None:
        return f"{found.sessions} consumers are connected, and one gets it when it has room"
    serving = list(dispatcher.consumers.values())
    if found.mode == "failover" and found.active:
        serving = [one for one in serving if one.name == found.active]
        if not serving:
            return f"consumer {found.active!r}, which is active, is not connected"
    if serving and not any(one.has_room for one in serving):
        return f"all its consumers are full or paused, {len(serving)} on this partition"
    return "it is about to be delivered" if serving else "its consumers are coming back"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds")
