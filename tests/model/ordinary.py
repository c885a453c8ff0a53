"""Machines whose workers try the scripts for the ordinary case first, as real ones do."""

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Capacity, Outgoing
from tests.model.machine import KEYS, SESSIONS_MS, BrokerMachine, names, rooms


class OrdinaryMachine(BrokerMachine):
    """Acks, publishes and fetches in turns, beside everything else that may happen."""

    ordinary = True
    counted: ClassVar[Counter[str]] = Counter()  # ordinary cases of all examples

    @rule(
        name=names,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        asked=rooms,
        settled=st.integers(0, 3),
        again=st.sampled_from((False,) * 5 + (True,)),
        caught_up=st.sampled_from((True, True, True, False)),
        joined=st.sampled_from((True, True, True, False)),
        behind=st.booleans(),
    )
    def take_a_turn(
        self,
        name: str,
        keys: list[str],
        asked: list[Capacity],
        settled: int,
        again: bool,
        caught_up: bool,
        joined: bool,
        behind: bool,
    ) -> None:
        """Settle what is held, publish and lease, also for the other subscription; else one by one."""
        both = self.both
        others = [one for one in both.partition.subscriptions if one != name] if behind else []
        for one in (name, *others):
            model = both.sub(one)
            for room in asked if joined else []:
                if not model.is_open(room.consumer, both.now) and (
                    model.mode != "exclusive" or not model.sessions
                ):
                    both.join(one, room.consumer, SESSIONS_MS[0])
            if caught_up:
                both.fetch(one, [room._replace(permits=100) for room in asked], 1_000)
        self.uids += [f"u{len(self.uids) + at}" for at in range(len(keys))]
        messages = [
            Outgoing(key, uid, "1  7 ") for key, uid in zip(keys, self.uids[-len(keys) :], strict=True)
        ]
        if again:
            messages[-1] = messages[-1]._replace(uid=self.uids[0])
        receipts = both.live(name)[:settled]
        if published := both.turn(name, messages, asked, receipts):
            for one in others:
                both.lease_behind(one, messages, published, asked)
        else:
            if receipts:
                both.ack(name, receipts)
            both.publish(messages)
            both.fetch(name, asked, 1_000)

    def teardown(self) -> None:
        """Count, and clean up."""
        if self.pair:
            type(self).counted += self.pair.counted
        super().teardown()


class SharedOrdinary(OrdinaryMachine):
    """A shared subscription."""

    mode = "shared"


class KeySharedOrdinary(OrdinaryMachine):
    """A key-shared subscription."""

    mode = "key_shared"


class FailoverOrdinary(OrdinaryMachine):
    """A failover subscription, which has no ordinary case but that of acks."""

    mode = "failover"
