"""Options: each error names the option and says what is allowed."""

from datetime import UTC, datetime

import pytest

from client.errors import InvalidArgument
from client.seeds import DEFAULT_SERVER
from pipeline.columns import columns_for
from pipeline.options import Connection, ReadOptions


def parse(*, streaming: bool = False, **options: str) -> ReadOptions:
    return ReadOptions.parse({"subscribe": "orders", **options}, streaming=streaming)


def test_a_topic_is_all_that_a_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYLANE_SERVER", raising=False)
    options = parse()
    assert options == ReadOptions(
        connection=Connection(DEFAULT_SERVER),
        topics=["orders"],
        subscription=None,
        start="earliest",
        end="latest",
        since=None,
        max_offsets=None,
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
    moment = parse(startingTimestamp=text).since
    assert moment is not None
    expected = (
        1_794_803_456 if text.isdecimal() else datetime(2026, 11, 16, 2, 50, 56, tzinfo=UTC).timestamp()
    )
    assert moment.timestamp() == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subscribe": ""}, "option 'subscribe' is '': name the topic to read"),
        ({"subscribe": "a,a"}, "names a topic twice"),
        ({"startingOffset": "latest"}, "no option 'startingOffset' .* did you mean 'startingOffsets'"),
        ({"wibble": "1"}, "no option 'wibble' .* there are server, token"),
        ({"path": "orders"}, "no path 'orders': name the topic with .option\\('subscribe'"),
        ({"server": "localhost:9999"}, "option 'server' is 'localhost:9999': use keylane://host:port"),
        ({"startingOffsets": "erliest"}, "option 'startingOffsets' is 'erliest': use earliest, latest"),
        (
            {"startingOffsets": '{"orders":{"0":0}}'},
            "position 0 in partition 0 of 'orders': use 1 for the first",
        ),
        ({"startingOffsets": '{"audits":{"0":1}}'}, "names topic 'audits', which 'subscribe' does not"),
        ({"endingOffsets": "earliest"}, "option 'endingOffsets' is 'earliest': nothing would be read"),
        ({"startingTimestamp": "yesterday"}, "option 'startingTimestamp' is 'yesterday': use milliseconds"),
        ({"startingTimestamp": "1", "startingOffsets": "latest"}, "not both"),
        ({"minPartitions": "0"}, "option 'minPartitions' is '0': use a whole number from 1 on"),
        ({"minPartitions": "1.5"}, "option 'minPartitions' is '1.5': use a whole number from 1 on"),
        ({"includeValue": "no"}, "option 'includeValue' is 'no': use true or false"),
        ({"columns": "key", "includeValue": "true"}, "'columns' and 'includeValue', not both"),
        ({"failOnDataLoss": ""}, "option 'failOnDataLoss' is '': use true or false"),
        ({"maxOffsetsPerTrigger": "5"}, "option 'maxOffsetsPerTrigger' is for spark.readStream only"),
        ({"journal": "true", "subscription": "s"}, "'subscription' means nothing with journal=true"),
        (
            {"journal": "true", "startingTimestamp": "1"},
            "'startingTimestamp' means nothing with journal=true",
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
        ({"subscription": "s", "journal": "true"}, "'journal' is for spark.read only"),
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
