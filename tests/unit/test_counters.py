"""What a worker counts, and how many names it knows at most."""

from keylane_broker.counters import MOST_SUBSCRIPTIONS, MOST_TOPICS, OTHER, Counters, Histogram


def test_a_histogram_counts_a_value_up_to_its_bound() -> None:
    histogram = Histogram((1, 10))
    for value in (0, 1, 2, 10, 11):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 24)


def test_names_are_bounded_and_the_rest_counts_as_one() -> None:
    counters = Counters()
    for number in range(MOST_TOPICS + 5):
        counters.topic(f"t{number}").published += 1
    for number in range(MOST_SUBSCRIPTIONS + 5):
        counters.subscription("t0", f"s{number}").acked += 1
    assert len(counters.topics) == MOST_TOPICS + 1
    assert counters.topics[OTHER].published == 5
    assert len(counters.subscriptions) == MOST_SUBSCRIPTIONS + 1
    assert counters.subscriptions[OTHER, OTHER].acked == 5
    counters.topic("t0").published += 1
    assert counters.topics["t0"].published == 2


def test_topics_that_are_gone_make_room_for_others() -> None:
    counters = Counters()
    for number in range(MOST_TOPICS + 1):
        counters.topic(f"t{number}")
    counters.subscription("t0", "s")
    counters.subscription("t1", "s")
    counters.forget_others({"t1"})
    assert counters.topics.keys() == {"t1", OTHER}
    assert counters.subscriptions.keys() == {("t1", "s")}
    assert counters.topic("new") is counters.topics["new"]


def test_consumers_of_a_multicast_subscription_count_as_one() -> None:
    counters = Counters()
    assert counters.subscription("t", "s@c1") is counters.subscription("t", "s@c2")


def test_without_timing_nothing_is_measured() -> None:
    counters = Counters(timing=False)
    counters.script_ran("publish", counters.now())
    assert sum(counters.scripts["publish"].counts) == 0
