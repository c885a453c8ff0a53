"""`keylane top`: rates from two looks."""

from datetime import UTC, datetime

from keylane.types import ClusterReport, SubscriptionInfo, TopicInfo
from keylane_broker.commandline.top_view import TOPIC_COLUMNS, Look, fitting, top_of, topic_rows

NOW = datetime(2026, 11, 18, tzinfo=UTC)


def look(seconds: float, published: int, backlog: int, *, consumers: int = 1, name: str = "orders") -> Look:
    topic = TopicInfo(name, 4, ["s"], 600.0, backlog, published)
    subscription = SubscriptionInfo(
        name, "s", "shared", "at_least_once", 30.0, None, False, backlog, backlog, 0, 0, ["c"] * consumers
    )
    report = ClusterReport("w", 1, [])
    return Look(seconds, NOW, report, {name: topic}, {(name, "s"): subscription})


def test_rates_are_those_between_two_looks() -> None:
    found = top_of(look(10.0, 100, 50), look(12.0, 300, 150), 20)
    [topic] = found.topics
    assert topic.published_per_second == 100.0
    [subscription] = topic.subscriptions
    assert subscription.settled_per_second == 50.0
    assert len(topic_rows(found)[0]) == len(TOPIC_COLUMNS)


def test_what_was_not_there_before_or_is_made_anew_has_no_rate() -> None:
    fresh = top_of(look(10.0, 5, 5, name="other"), look(12.0, 300, 150), 20)
    assert fresh.topics[0].published_per_second == 0
    again = top_of(look(10.0, 1000, 0), look(12.0, 3, 3), 20)
    assert (
        again.topics[0].published_per_second,
        again.topics[0].subscriptions[0].settled_per_second,
    ) == (0, 0)


def test_the_busiest_come_first_and_the_rest_is_counted() -> None:
    before, now = look(0.0, 0, 0, name="busy"), look(1.0, 100, 0, name="busy")
    for side in (before, now):
        idle = look(0.0, 0, 7, name="a", consumers=0)
        side.topics.update(idle.topics)
        side.subscriptions.update(idle.subscriptions)
    assert [topic.name for topic in top_of(before, now, 20).topics] == ["busy", "a"]
    found = top_of(before, now, 1)
    assert ([topic.name for topic in found.topics], found.left_out) == (["busy"], 1)
    assert topic_rows(top_of(before, now, 20))[1][-1] == "no consumer"


def test_a_narrow_terminal_has_no_columns_of_detail() -> None:
    rows = topic_rows(top_of(look(10.0, 100, 50), look(12.0, 300, 150), 20))
    assert fitting(rows, 100) == (TOPIC_COLUMNS, [list(row) for row in rows])
    columns, [row] = fitting(rows, 80)
    assert columns == ["topic", "subscription", "in/s", "out/s", "backlog", "consumers", "state"]
    assert row == ["orders", "s", 100, 50, 150, 1, "ok"]
