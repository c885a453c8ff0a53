"""Options: each error names the option and says what is allowed."""

import json
from datetime import UTC, datetime

import pytest

from keylane.connect.seeds import DEFAULT_SERVER
from keylane.errors import InvalidArgument
from keylane_spark.connection import Connection
from keylane_spark.source.options import BatchLimits, ReadOptions
from keylane_spark.source.schema import columns_for
from keylane_spark.source.topic_selection import TopicSelection


def parse(*, streaming: bool = False, **options: str) -> ReadOptions:
    return ReadOptions.parse({"subscribe": "orders", **options}, streaming=streaming)


def test_a_topic_is_all_that_a_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYLANE_SERVER", raising=False)
    options = parse()
    assert options == ReadOptions(
        connection=Connection(DEFAULT_SERVER),
        selection=TopicSelection(["orders"]),
        subscription=None,
        start="earliest",
        end="latest",
        since=None,
        until=None,
        limits=BatchLimits(),
        min_partitions=1,
        fail_on_data_loss=True,
        include_value=True,
        columns=None,
        session=10.0,
        journal=False,
    )


def test_names_of_options_are_case_insensitive() -> None:
    options = ReadOptions.parse({"SUBSCRIBE": "a, b", "failondataloss": "FALSE", "minPARTITIONS": "3"})
    assert (options.topics, options.fail_on_data_loss, options.min_partitions) == (["a", "b"], False, 3)


def test_the_server_is_that_of_the_environment_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_SERVER", "keylane://broker:7")
    assert parse().connection.server == "keylane://broker:7"
    assert parse(server="keylane://other:8").connection.server == "keylane://other:8"


def test_the_token_is_that_of_the_driver_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors have other environments: they get it from there."""
    monkeypatch.setenv("KEYLANE_TOKEN", "secret")
    assert parse().connection.token == "secret"
    assert parse(token="given").connection.token == "given"


def test_positions_are_given_as_json() -> None:
    options = parse(startingOffsets='{"orders":{"0":17,"1":-2}}', endingOffsets='{"orders":{"0":-1}}')
    assert options.start == {"orders": {0: 17, 1: -2}}
    assert options.end == {"orders": {0: -1}}


@pytest.mark.parametrize("text", ["1794803456000", "2026-11-16T02:50:56Z", "2026-11-16T02:50:56"])
def test_a_time_is_milliseconds_or_iso_and_utc_if_it_does_not_say(text: str) -> None:
    since = parse(startingTimestamp=text).since
    assert since is not None
    expected = (
        1_794_803_456 if text.isdecimal() else datetime(2026, 11, 16, 2, 50, 56, tzinfo=UTC).timestamp()
    )
    assert since.of("orders", 0) == since.of("orders", 7) == expected * 1000


def test_a_time_is_that_millisecond_or_the_next() -> None:
    for text, ms in (("0.305", 305), ("0.305001", 306), ("0", 0)):
        since = parse(startingTimestamp=f"2026-11-16T02:50:{56 + float(text):09.6f}Z").since
        assert since is not None
        assert since.everywhere == 1_794_797_456_000 + ms
    everything = parse(startingTimestamp="0", endingTimestamp="0")
    assert everything.since is not None
    assert everything.until is not None
    assert everything.since.of("orders", 0) == everything.until.of("orders", 0) == 0


def test_times_are_given_by_partition_too() -> None:
    text = '{"orders":{"0":1794803456000,"2":"2026-11-16T02:50:56Z"}}'
    options = parse(startingOffsetsByTimestamp=text, endingOffsetsByTimestamp=text)
    assert options.since is not None
    assert options.until is not None
    assert [options.since.of("orders", at) for at in range(3)] == [1_794_803_456_000, None, 1_794_797_456_000]
    assert options.until.each == options.since.each


@pytest.mark.parametrize("text", ["1794803456", "1", "1970-01-31T23:59:59Z"])
@pytest.mark.parametrize("which", ["starting", "ending"])
def test_a_time_in_seconds_is_not_taken_for_one_in_january_1970(text: str, which: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{which}Timestamp' is '{text}'.*use milliseconds since 1970"):
        ReadOptions.parse({"subscribe": "orders", f"{which}Timestamp": text})
    each = json.dumps({"orders": {"0": int(text) if text.isdecimal() else text}})
    with pytest.raises(InvalidArgument, match=f"'{which}OffsetsByTimestamp' is '{text}'.*use milliseconds"):
        ReadOptions.parse({"subscribe": "orders", f"{which}OffsetsByTimestamp": each})


def test_topics_are_chosen_by_a_pattern_that_the_whole_name_has_to_match() -> None:
    selection = ReadOptions.parse({"subscribePattern": "orders-[0-9]+"}).selection
    assert selection.covers("orders-17")
    assert not selection.covers("orders-17.dead")
    assert selection.topics == []


def test_partitions_are_assigned() -> None:
    selection = ReadOptions.parse({"assign": '{"orders":[2,0],"audits":[1]}'}).selection
    assert (selection.topics, selection.of("orders", 3)) == (["orders", "audits"], [0, 2])
    with pytest.raises(InvalidArgument, match="names partition 2 of 'orders', which has 2: 0 to 1"):
        selection.of("orders", 2)


def test_a_batch_of_a_stream_is_limited_in_several_ways() -> None:
    limits = parse(
        streaming=True,
        subscription="s",
        maxOffsetsPerTrigger="100",
        maxBytesPerTrigger="1000000",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="5 min",
    ).limits
    assert limits == BatchLimits(100, 1_000_000, 10, 300.0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subscribe": "a", "subscribePattern": "b"}, "'subscribe' and 'subscribePattern', not both"),
        ({"assign": '{"a":[1]}', "subscribePattern": "b"}, "'subscribePattern' and 'assign', not both"),
        ({"subscribePattern": "a("}, "option 'subscribePattern' is 'a\\(': it is not a regular expression"),
        ({"subscribePattern": ""}, "use a regular expression"),
        ({"assign": "orders"}, "option 'assign' is 'orders': use the partitions of each topic as JSON"),
        ({"assign": "{}"}, "it leaves nothing to read"),
        ({"assign": '{"a":[]}'}, "it leaves nothing to read"),
        ({"assign": '{"a":[1,1]}'}, "name each partition once"),
        ({"assign": '{"a":[-1]}'}, "name each partition once, from 0 on"),
        (
            {"assign": '{"a":[1]}', "startingOffsets": '{"a":{"0":1}}'},
            "'startingOffsets' names partition 0 of 'a', which 'assign' does not",
        ),
        (
            {"subscribePattern": "a.*", "startingOffsets": '{"b":{"0":1}}'},
            "names topic 'b', which 'subscribePattern' does not",
        ),
    ],
)
def test_a_choice_that_cannot_be_meant_is_named(options: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        ReadOptions.parse(options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subscribe": ""}, "option 'subscribe' is '': name the topic to read"),
        ({"subscribe": "a,a"}, "names a topic twice"),
        ({"startingOffset": "latest"}, "no option 'startingOffset' .* did you mean 'startingOffsets'"),
        ({"wibble": "1"}, "no option 'wibble' .* there are server, token"),
        ({"path": "orders"}, "no path \\('orders'\\): name the topic with .option\\('subscribe'"),
        ({"server": "localhost:9999"}, "option 'server' is 'localhost:9999': use keylane://host:port"),
        ({"startingOffsets": "erliest"}, "option 'startingOffsets' is 'erliest': use earliest, latest"),
        (
            {"startingOffsets": '{"orders":{"0":0}}'},
            "position 0 in partition 0 of 'orders': use 1 for the first",
        ),
        ({"startingOffsets": '{"audits":{"0":1}}'}, "names topic 'audits', which 'subscribe' does not"),
        ({"endingOffsets": "earliest"}, "option 'endingOffsets' is 'earliest': nothing would be read"),
        ({"startingTimestamp": "yesterday"}, "option 'startingTimestamp' is 'yesterday': use milliseconds"),
        (
            {"startingTimestamp": "1", "startingOffsets": "latest"},
            "'startingOffsets' and 'startingTimestamp', not both",
        ),
        (
            {"endingTimestamp": "1", "endingOffsetsByTimestamp": "{}"},
            "'endingTimestamp' and 'endingOffsetsByTimestamp', not both",
        ),
        (
            {"startingOffsetsByTimestamp": "1"},
            "'startingOffsetsByTimestamp' is '1': use times as JSON, milliseconds",
        ),
        (
            {"endingOffsetsByTimestamp": '{"audits":{"0":1}}'},
            "'endingOffsetsByTimestamp' names topic 'audits', which 'subscribe' does not",
        ),
        ({"minPartitions": "0"}, "option 'minPartitions' is '0': use a whole number from 1 on"),
        ({"minPartitions": "1.5"}, "option 'minPartitions' is '1.5': use a whole number from 1 on"),
        ({"includeValue": "no"}, "option 'includeValue' is 'no': use true or false"),
        ({"columns": "key", "includeValue": "true"}, "'columns' and 'includeValue', not both"),
        ({"failOnDataLoss": ""}, "option 'failOnDataLoss' is '': use true or false"),
        ({"maxOffsetsPerTrigger": "5"}, "option 'maxOffsetsPerTrigger' is for spark.readStream only"),
        ({"journal": "true", "subscription": "s"}, "'subscription' does not apply to journal=true"),
        (
            {"journal": "true", "startingTimestamp": "1"},
            "'startingTimestamp' does not apply to journal=true",
        ),
    ],
)
def test_an_option_that_cannot_be_right_is_named(options: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        ReadOptions.parse({"subscribe": "orders", **options})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "option 'subscription' is missing: a streaming query is a subscription"),
        ({"subscription": "s", "endingOffsets": "latest"}, "'endingOffsets' is for spark.read only"),
        ({"subscription": "s", "endingTimestamp": "1"}, "'endingTimestamp' is for spark.read only"),
        ({"journal": "true", "subscription": "s"}, "'subscription' does not apply to journal=true"),
        ({"journal": "true", "maxBytesPerTrigger": "1"}, "'maxBytesPerTrigger' does not apply to journal"),
        ({"subscription": "s", "maxTriggerDelay": "1s"}, "no effect without 'minOffsetsPerTrigger'"),
        (
            {"subscription": "s", "minOffsetsPerTrigger": "9", "maxTriggerDelay": "60"},
            "'maxTriggerDelay' is '60': use a duration with its unit, such as 500ms",
        ),
        (
            {"subscription": "s", "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "'minOffsetsPerTrigger' is 9, more than 'maxOffsetsPerTrigger', 8",
        ),
        ({"subscription": "s", "maxOffsetsPerTrigger": "0"}, "'maxOffsetsPerTrigger' is '0'"),
        ({"subscription": "s", "sessionTimeout": "0.1"}, "'sessionTimeout' is '0.1': use seconds from 1 on"),
        ({"subscription": "s", "sessionTimeout": "nan"}, "'sessionTimeout' is 'nan': use seconds from 1 on"),
    ],
)
def test_an_option_that_a_stream_cannot_have_is_named(options: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        ReadOptions.parse({"subscribe": "orders", **options}, streaming=True)


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ("key,vale", "there is no column 'vale', but key, value, topic"),
        ("", "there is no column ''"),
        ("key,Key", "'key,Key': it names a column twice"),
    ],
)
def test_a_column_that_there_is_not_is_named(columns: str, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        columns_for(parse(columns=columns))


def test_columns_are_those_asked_for_in_that_order() -> None:
    assert columns_for(parse()).names[:3] == ["key", "value", "topic"]
    assert "value" not in columns_for(parse(includeValue="false")).names
    assert columns_for(parse(columns="Value, key")).names == ["value", "key"]
    assert columns_for(parse(columns="last,first", journal="true")).names == ["last", "first"]
