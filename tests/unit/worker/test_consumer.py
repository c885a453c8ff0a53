"""What a consumer may still be sent: permits, by partition and over all of them."""

from keylane import wire
from keylane_broker.worker.consumer import Consumer, Consumers


class Outlet:
    """A connection that remembers what was sent."""

    def __init__(self) -> None:
        self.streams: dict[int, Consumer] = {}
        self.takes_more = True
        self.writable = True
        self.alive = True
        self.sent: list[wire.Properties] = []
        self.answered: list[int] = []

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        self.sent.append(properties)
        if sequence:
            self.answered.append(sequence)

    def flush(self) -> None:
        pass

    def begin_fetch(self) -> None:
        pass

    def end_fetch(self) -> None:
        pass

    def allow_fetches(self) -> None:
        pass


class Source:
    """A dispatcher that remembers whom it was told of."""

    def __init__(self) -> None:
        self.failing = False
        self.has_work = True
        self.told = 0

    def notify(self) -> None:
        pass

    def may_have_work_for(self, consumer: Consumer) -> None:
        pass

    def take_room(self, consumer: Consumer) -> bool:
        self.told += 1
        return self.has_work

    async def renew_sessions(self, session_ms: int) -> None:
        pass

    def holds_nothing(self, consumer: Consumer) -> None:
        pass

    def detach(self, consumer: Consumer) -> None:
        consumer.waiting.pop(0, None)


def consumer(permits: int, partitions: int = 1) -> tuple[Consumer, Outlet, list[Source]]:
    """One that is open on some partitions."""
    outlet, sources = Outlet(), [Source() for _ in range(partitions)]
    request = wire.Subscribe(1, "t", "s", "c", permits=permits)
    opened = Consumers().open(outlet, request, 30_000, 1)
    opened.dispatchers.update(enumerate(sources))
    opened.partitions.update(range(partitions))
    return opened, outlet, sources


def deliver(one: Consumer, partition: int, messages: int) -> None:
    """As a fetch does that leases so many."""
    permits = one.reserve()
    one.out[partition] += messages
    one.unreserve(permits, permits - messages)


def test_a_fetch_may_use_all_permits_where_there_is_one_partition_and_a_share_where_there_are_more() -> None:
    assert consumer(1_000)[0].reserve() == 1_000
    one, _, _ = consumer(1_000, partitions=3)
    assert [one.reserve() for _ in range(4)] == [333, 222, 148, 99]
    many, _, _ = consumer(1_000, partitions=64)
    assert [many.reserve() for _ in range(2)] == [64, 64]  # less than 64 is not worth a call
    assert one.headroom == 1_000  # until something comes of them


def test_permits_come_back_when_messages_are_settled_and_never_more_than_there_were() -> None:
    one, _, _ = consumer(10)
    deliver(one, 0, 10)
    assert not one.has_room
    one.take_back(4, 0)
    assert (one.credit, one.out[0]) == (4, 6)
    one.take_back(99, 0)
    assert (one.credit, one.out[0]) == (10, 0)


def test_whoever_waits_for_permits_hears_of_them_one_at_a_time_while_they_are_few() -> None:
    one, _, sources = consumer(4, partitions=3)
    deliver(one, 0, 4)
    one.waiting.update(enumerate(sources))
    one.take_back(1, 0)
    assert [source.told for source in sources] == [1, 0, 0]
    one.take_back(1, 0)
    assert [source.told for source in sources] == [1, 1, 0]


def test_one_that_has_no_work_any_more_does_not_keep_permits_from_others() -> None:
    one, _, sources = consumer(4, partitions=3)
    deliver(one, 0, 4)
    one.waiting.update(enumerate(sources))
    sources[0].has_work = False
    one.take_back(1, 0)
    assert [source.told for source in sources] == [1, 1, 0]


def test_one_whose_redis_is_away_does_not_keep_permits_from_others() -> None:
    one, _, sources = consumer(4, partitions=3)
    deliver(one, 0, 4)
    one.waiting.update(enumerate(sources))
    sources[0].failing = True
    one.take_back(1, 0)
    assert [source.told for source in sources] == [1, 1, 0]


def test_a_lower_limit_is_answered_once_no_more_than_that_is_out() -> None:
    one, outlet, _ = consumer(10)
    deliver(one, 0, 8)
    one.limit(5, 77, 0)
    assert outlet.answered == []
    one.take_back(2, 0)
    assert outlet.answered == []
    one.take_back(1, 0)
    assert outlet.answered == [77]
    assert not one.has_room


def test_permits_go_along_with_a_partition_that_moves() -> None:
    one, outlet, _ = consumer(10, partitions=2)
    deliver(one, 0, 3)
    deliver(one, 1, 2)
    one.redirect(0, "elsewhere:9999")
    [said] = outlet.sent
    assert isinstance(said, wire.Redirect)
    assert (said.partition, said.permits) == (0, 3)
    assert (one.permits, one.credit, dict(one.out)) == (7, 5, {1: 2})
    one.limit(10, 78, 0)  # said by a client that has not heard of the move: 3 of these are elsewhere
    assert (one.permits, one.credit) == (7, 5)


def test_a_client_without_permits_hears_once_that_there_may_be_messages() -> None:
    one, outlet, _ = consumer(0)
    one.want()
    one.want()
    assert outlet.sent == [wire.Flow(1, wanted=True)]


def test_nobody_is_sent_anything_while_it_is_paused_or_its_connection_is_full() -> None:
    one, outlet, _ = consumer(10)
    assert one.has_room
    one.paused = True
    assert not one.has_room
    one.paused, outlet.takes_more = False, False
    assert not one.has_room


def test_of_each_name_there_is_one_and_the_newest_wins() -> None:
    consumers, old, new = Consumers(), Outlet(), Outlet()
    first = consumers.open(old, wire.Subscribe(1, "t", "s", "c", permits=1), 30_000, 1)
    second = consumers.open(new, wire.Subscribe(5, "t", "s", "c", permits=1), 30_000, 1)
    assert consumers.get("t", "s", "c") is second
    assert old.streams == {}
    assert new.streams == {5: second}
    [said] = old.sent
    assert isinstance(said, wire.Error)
    assert said.code == "consumer_replaced"
    first.forget()  # once more, as the end of its connection does
    assert consumers.get("t", "s", "c") is second
    second.forget()
    assert consumers.get("t", "s", "c") is None
