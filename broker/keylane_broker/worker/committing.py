"""Commits how far a reader is, in as many partitions and steps as one frame may ask for."""

import asyncio

from keylane import wire
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Committed

_STEPS = 20  # of a commit in one frame, each of a thousand entries: in so many partitions at once, or in one


async def commit(engine: Engine, request: wire.Commit) -> list[int]:
    """Return the partitions that are done; the others come again."""
    positions = list(request.positions.items())
    steps = max(1, _STEPS // max(len(positions), 1))
    steps_done = 0
    done: list[int] = []
    for at in range(0, len(positions), _STEPS):
        some = positions[at : at + _STEPS]
        found = await asyncio.gather(
            *(
                engine.commit(
                    request.topic,
                    request.subscription,
                    request.reader,
                    partition,
                    position,
                    sought=request.sought.get(partition, 0),
                    ledger=request.ledgers.get(partition, 0),
                    incarnation=request.incarnation,
                    subscription_incarnation=request.subscription_incarnation,
                    steps=steps,
                )
                for partition, position in some
            ),
            return_exceptions=True,
        )
        for (partition, _), answer in zip(some, found, strict=True):
            if isinstance(answer, Committed):
                steps_done += answer.steps
                done += [partition] if answer.done else []
        errors = [answer for answer in found if isinstance(answer, BaseException)]
        if errors and not steps_done:
            raise errors[0]
        if errors:
            break  # it comes again
    return done
