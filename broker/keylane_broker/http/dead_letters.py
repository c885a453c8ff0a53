"""What has failed too often: dead letters and parked lanes."""

import msgspec

from keylane import DeadLetter, ParkedLane
from keylane.wire.about import INLINE, WITHHELD
from keylane_broker.http import values
from keylane_broker.http.operations import Call, operation

_DEAD_LETTERS = "/v1/topics/{topic}/dead-letters"
_LANES = "/v1/topics/{topic}/subscriptions/{subscription}/lanes"


@operation("GET", _DEAD_LETTERS)
async def dead_letters(call: Call, query: values.DeadLetterQuery) -> list[DeadLetter]:
    """List dead letters of a topic."""
    found: list[DeadLetter] = []
    async for letter in call.client.dead_letters(
        call.topic, query.subscription, reason=query.reason, key=query.key
    ):
        found.append(_shown(call, letter))
        if len(found) == query.limit:
            break
    return found


def _shown(call: Call, letter: DeadLetter) -> DeadLetter:
    """Return a dead letter as its reader may see it: a body that is inline is for who may consume it."""
    if letter.body[:1] != INLINE or call.identity.may("consume", letter.dead_letter_topic):
        return letter
    return msgspec.structs.replace(letter, body=WITHHELD)


@operation("POST", _DEAD_LETTERS + "/redrive")
async def redrive(call: Call, body: values.DeadLetterChoice) -> values.Redriven:
    """Send dead letters back to the subscriptions that they failed in."""
    return values.Redriven(await call.client.redrive(call.topic, **body.options()))


@operation("POST", _DEAD_LETTERS + "/purge")
async def purge_dead_letters(call: Call, body: values.DeadLetterChoice) -> values.Purged:
    """Delete dead letters for good."""
    return values.Purged(await call.client.purge_dead_letters(call.topic, **body.options()))


@operation("GET", _LANES)
async def parked(call: Call) -> list[ParkedLane]:
    """List lanes that have stopped at a message without retries left."""
    return await call.client.parked(call.topic, call.subscription)


@operation("POST", _LANES)
async def unpark(call: Call, body: values.Unpark) -> None:
    """Let a lane go on: resume, skip or redrive."""
    await call.client.unpark(call.topic, call.subscription, **body.options())


@operation("POST", _LANES + "/move")
async def move_key(call: Call, body: values.KeyMove) -> values.Moved:
    """Have a consumer of a key_shared subscription be the next one that gets a free key."""
    return values.Moved(await call.client.move_key(call.topic, call.subscription, **body.options()))
