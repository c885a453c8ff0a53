"""A machine whose messages expire, some of them, at all kinds of moments."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Capacity, Outgoing
from tests.model.machine import BrokerMachine, Item, in_one_draw, names

TTLS_MS = (1_000, 2_500, 6_000)
WIDE = [Capacity("c1", 20, 30_000), Capacity("c2", 3, 5_000)]

expiring = in_one_draw(
    18,
    lambda choose: [
        (choose(("a", "a", "b", "")), choose((None, *TTLS_MS))) for _ in range(choose((1, 3, 6, 8)))
    ],
)


class Expiring(BrokerMachine):
    """Everything that may happen, and messages that expire."""

    @rule(batch=expiring, name=names, fetched=st.booleans())
    def publish_expiring(self, batch: list[tuple[str, int | None]], name: str, fetched: bool) -> None:
        """Publish messages of which some expire, and perhaps lease them."""
        messages, expire = [], {}
        for place, (key, ttl_ms) in enumerate(batch):
            self.uids.append(f"u{len(self.uids)}")
            messages.append(Outgoing(key, self.uids[-1], "1  7 "))
            if ttl_ms is not None:
                expire[place] = ttl_ms
        self.both.publish(messages, expire)
        if fetched:
            self.fetch(name, list[Item](), WIDE, 1_000, joined=True, settled=False)

    @rule(
        limit=st.sampled_from((500, 2)),
        ms=st.sampled_from((0, 1_000, 6_000)),
        early_ms=st.sampled_from((0, 1, None)),
    )
    def expire_messages(self, limit: int, ms: int, early_ms: int | None) -> None:
        """Drop what has expired, perhaps at the very instant at which the next one does, or just before."""
        ahead = [at for at in self.both.partition.expiries.values() if at > self.both.now]
        due = min(ahead, default=0) - (early_ms or 0)
        if early_ms is not None and due > self.both.now:
            self.both.advance(due - self.both.now)
        elif ms:
            self.both.advance(ms)
        self.both.expire_messages(limit)

    @rule(
        name=names,
        how=st.sampled_from(("nack", "ack", "seek", "leave", "time out", "wait")),
        ms=st.sampled_from(TTLS_MS),
    )
    def give_back(self, name: str, how: str, ms: int) -> None:
        """Let what is leased expire, then settle it or give it back, and fetch."""
        self.see_to_leases(name)
        if receipts := self.both.live(name):
            self.both.extend(name, receipts, 30_000)
            if how == "wait":
                self.both.nack(name, receipts[:1], 60_000, charged=True)
        self.both.advance(ms)
        self.both.expire_messages(500)
        receipts = self.both.live(name)
        if how == "nack" and receipts:
            self.both.nack(name, receipts, 0, charged=True)
        elif how == "ack" and receipts:
            self.both.ack(name, receipts)
        elif how == "seek":
            self.both.seek(name, "earliest")
        elif how == "leave":
            self.both.leave(name, "c1")
        elif how == "time out":
            self.both.advance(30_000)
            self.both.expire(name)
        self.fetch(name, list[Item](), WIDE, 1_000, joined=True, settled=False)
