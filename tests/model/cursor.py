"""A machine with a reader by position among consumers of all modes."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane.errors import (
    ConsumerReplaced,
    InvalidArgument,
    MessagesLost,
    SubscriptionMoved,
    SubscriptionNotFound,
)
from tests.model.machine import SESSIONS_MS, BrokerMachine
from tests.model.model import Subscription

SPARK = "spark"
readers = st.sampled_from(("r1", "r1", "r1", "r2"))
meant = st.sampled_from(("any", "this", "this", "old"))  # which subscription of that name


class CursorMachine(BrokerMachine):
    """Two subscriptions with consumers and one with a reader, which claims and commits."""

    mode = "key_shared"
    reader = ""  # who has claimed last
    made = 0  # its number
    old = 1  # that of the one before, or of none
    ledgers: dict[int, int]  # how far the log went when it was looked at in each
    sought = 0  # how often it was moved

    def model(self) -> Subscription:
        """The model of the subscription; it is made if it is not there."""
        if SPARK not in self.both.partition.subscriptions:
            self.both.modes[SPARK] = "cursor"
            self.both.create_subscription(SPARK, "earliest")
            self.reader, self.sought, self.ledgers, self.old = "", 0, {}, self.made or 1
        [here] = self.both.world.run(self.both.operator.offsets(self.both.topic, SPARK))
        self.made, self.ledgers[here.ledger] = here.subscription_incarnation, here.latest
        return self.both.partition.subscriptions[SPARK]

    @rule(reader=readers, session_ms=st.sampled_from(SESSIONS_MS), meant=meant)
    def claim(self, reader: str, session_ms: int, meant: str) -> None:
        """Open or renew the session of the one reader, at times that of a subscription that is gone."""
        model, now = self.model(), self.both.now
        number = {"any": 0, "this": self.made, "old": self.old}[meant]
        what = f"{reader} claims {meant} for {session_ms}"
        step = self.both.operator.claim(
            self.both.topic, SPARK, reader, session_ms, subscription_incarnation=number
        )
        if meant == "old":
            self.both.refuse(SubscriptionNotFound, what, step)
            return
        told = self.both.do(what, step)
        left = model.sessions.get(self.reader, 0) - now
        if self.reader not in ("", reader) and left > 0:
            assert (told.granted, told.holder, told.remaining_ms) == (False, self.reader, left)
        else:
            assert told.granted
            model.sessions, self.reader = {reader: now + session_ms}, reader

    @rule(reader=readers)
    def release(self, reader: str) -> None:
        """End a session, if the reader has one."""
        model = self.model()
        self.both.do(f"{reader} goes", self.both.operator.release_claim(self.both.topic, SPARK, reader))
        model.sessions.pop(reader, None)

    @rule(
        reader=readers,
        claimed=st.sampled_from((True, True, True, False)),
        share=st.sampled_from((0.2, 0.5, 0.5, 0.8, 1.0)),
        more=st.sampled_from((0, 0, 0, 0, -3, 1)),
        steps=st.sampled_from((0, 0, 1)),
        late=st.sampled_from((0, 0, 0, 1)),
        meant=meant,
    )
    def commit(
        self, reader: str, claimed: bool, share: float, more: int, steps: int, late: int, meant: str
    ) -> None:
        """Commit some way into what is there, at times backwards, too far, late, or as another reader."""
        model, last = self.model(), self.both.partition.last
        if claimed:
            reader = self.reader or reader
            self.claim(reader, SESSIONS_MS[0], "any")
        first = min(model.owed, default=last + 1)
        position = max(1, round(first + (last + 1 - first) * share) + more)
        sought = max(0, self.sought - late)  # as it was before the last seek
        step = self.both.operator.commit(
            self.both.topic,
            SPARK,
            reader,
            0,
            position,
            sought=self.made + sought,
            subscription_incarnation={"any": 0, "this": self.made, "old": self.old}[meant],
            # The oldest in which it can have been read.
            ledger=min(
                (ledger for ledger, end in self.ledgers.items() if end >= position), default=max(self.ledgers)
            )
            if meant == "this"
            else 0,
            steps=steps,
        )
        what = f"{reader} commits {position} of {meant}"
        if meant == "old":
            self.both.refuse(SubscriptionNotFound, what, step)
        elif reader != self.reader:
            self.both.refuse(ConsumerReplaced if self.reader else InvalidArgument, what, step)
        elif sought != self.sought:
            self.both.refuse(SubscriptionMoved, what, step)
        elif position > last + 1:
            self.both.refuse(MessagesLost if meant == "this" else InvalidArgument, what, step)
        else:
            before = self.position()
            told = self.both.do(what, step)
            reached = self.position()
            assert reached == max(before, position) or (steps and not told.done and reached > before)
            model.owed = {number: owed for number, owed in model.owed.items() if number >= reached}
            self.both.partition.forget()

    @rule(
        how=st.sampled_from(("seek", "delete", "expire")),
        position=st.sampled_from(("earliest", 1, 3, 8, 20, "latest")),
    )
    def disturb_reader(self, how: str, position: str | int) -> None:
        """Let an operator move or remove the subscription, or its worker look for what is over."""
        self.model()
        if how == "seek":
            self.both.seek(SPARK, position)
            self.sought += 1
        elif how == "delete":
            self.both.delete_subscription(SPARK)
        else:
            self.both.expire(SPARK)
        self.both.latest = "main"

    @rule()
    def read(self) -> None:
        """The log has what the model says, and from the position on it is what the subscription owes."""
        partition = self.both.partition
        partition.forget()
        lines = self.both.world.run(self.both.operator.read(self.both.topic, 0, 1, partition.last + 1))
        pairs = zip(lines.ranges[::2], lines.ranges[1::2], strict=True)
        read = [entry for first, last in pairs for entry in range(first, last + 1)]
        assert read == list(partition.log)
        texts = [text for entry in partition.log.values() for text in (entry.key, entry.uid, entry.about)]
        assert lines.flat == texts
        if SPARK in partition.subscriptions:
            owed = list(partition.subscriptions[SPARK].owed)
            assert [entry for entry in read if entry >= self.position()] == owed

    def position(self) -> int:
        """Where the subscription is."""
        [here] = self.both.world.run(self.both.operator.offsets(self.both.topic, SPARK))
        assert here.position is not None
        return here.position
