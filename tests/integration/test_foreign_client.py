"""A client written from docs/protocol.md alone: sockets, struct, CRC-32 and a bit of MessagePack by hand.

Nothing of `client` is imported here. If this stops working, the page and the worker do not agree.
"""

import json
import re
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from tests.support.running import RunningBroker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

DATA, ACK, HEARTBEAT, CREATE_TOPIC, SUBSCRIBE, UNSUBSCRIBE, PUBLISH, INFO, NACK = range(1, 10)
FLOW, ERROR, OK = 11, 13, 14
DELETE_TOPIC, CREATE_SUBSCRIPTION, DELETE_SUBSCRIPTION, DESCRIBE_SUBSCRIPTION = 15, 18, 19, 20
DELETE_BODIES, PURGE = 34, 39

# MessagePack, as much of it as the page needs


def pack(value: Any) -> bytes:
    """A value as MessagePack, in the shortest form for what is short and the longest for all else."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return bytes([value]) if 0 <= value < 128 else struct.pack(">Bq", 0xD3, value)
        case str():
            data = value.encode()
            return (
                bytes([0xA0 | len(data)]) if len(data) < 32 else struct.pack(">BI", 0xDB, len(data))
            ) + data
        case list():
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(pack, value))
        case dict():
            items = (pack(name) + pack(item) for name, item in value.items())
            return struct.pack(">BI", 0xDF, len(value)) + b"".join(items)
    raise TypeError(type(value))


_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


class Unpacker:
    """Reads values out of MessagePack, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        """A number in a form of struct."""
        [value] = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self, size: int) -> str:
        """A text of so many bytes."""
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self) -> Any:
        """The next value."""
        head = self.number(">B")
        if head < 0x80 or head >= 0xE0:
            return head if head < 0x80 else head - 0x100
        if head in _NUMBERS:
            return self.number(_NUMBERS[head])
        if head in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[head]
        size = self.number(_SIZES[head]) if head in _SIZES else head & (0x1F if head >= 0xA0 else 0x0F)
        if 0xA0 <= head < 0xC0 or 0xD9 <= head <= 0xDB:
            return self.text(size)
        if 0x90 <= head < 0xA0 or head in (0xDC, 0xDD):
            return [self.value() for _ in range(size)]
        return {self.value(): self.value() for _ in range(size)}


# The client


class Received(NamedTuple):
    """A frame, unpacked."""

    type: int
    sequence: int
    timestamp_ms: int
    properties: dict[Any, Any]
    body: Any


def frame(type: int, sequence: int, properties: dict[str, Any], body: Any = None) -> bytes:
    """A frame, byte by byte as the page has it."""
    packed = pack(properties) if properties else b""
    payload = pack(body) if body is not None else b""
    length = 28 + len(packed) + len(payload)
    head = struct.pack(">IIQQI", length, type, sequence, int(time.time() * 1000), len(packed))
    return head + packed + struct.pack(">I", len(payload)) + payload


def unpack_frame(data: bytes) -> Received:
    """What a frame says; the bytes after its length."""
    type, sequence, timestamp_ms, size = struct.unpack_from(">IQQI", data)
    properties, body = data[24 : 24 + size], data[28 + size :]
    assert struct.unpack_from(">I", data, 24 + size) == (len(body),)
    return Received(
        type,
        sequence,
        timestamp_ms,
        Unpacker(properties).value() if properties else {},
        Unpacker(body).value() if body else None,
    )


class Refused(Exception):
    """An ERROR."""


class TinyClient:
    """One connection, one thing at a time."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("keylane://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.sequence = 0
        self.deliveries: deque[Received] = deque()
        self.polite = True

    def __enter__(self) -> "TinyClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, type: int, properties: dict[str, Any], body: Any = None) -> int:
        """Send a request, answers its sequence."""
        self.sequence += 1
        self.socket.sendall(frame(type, self.sequence, properties, body))
        return self.sequence

    def hear(self) -> Received:
        """The next frame; a heartbeat is answered, as is polite."""
        received = unpack_frame(self._read(struct.unpack(">I", self._read(4))[0]))
        if received.type == HEARTBEAT and self.polite:
            self.socket.sendall(frame(OK, received.sequence, {}))
        return received

    def receive(self) -> Received:
        """The next frame that is no heartbeat."""
        while (received := self.hear()).type == HEARTBEAT:
            pass
        return received

    def call(self, type: int, properties: dict[str, Any], body: Any = None) -> Received:
        """Send a request and wait for its answer; what is delivered meanwhile is kept."""
        sequence = self.send(type, properties, body)
        while (received := self.receive()).sequence != sequence:
            assert received.type == DATA
            self.deliveries.append(received)
        if received.type == ERROR:
            raise Refused(received.properties["code"], received.properties["message"])
        assert received.type == OK
        return received

    def delivery(self) -> Received:
        """The next DATA."""
        received = self.deliveries.popleft() if self.deliveries else self.receive()
        assert received.type == DATA, received
        return received

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def messages_of(data: Received) -> Iterator[tuple[int, str, str, str]]:
    """Entry, key, uid and about of each message of a DATA frame."""
    ranges, texts, _, _ = data.body
    entries = [
        n for first, last in zip(ranges[::2], ranges[1::2], strict=True) for n in range(first, last + 1)
    ]
    return zip(entries, texts[::3], texts[1::3], texts[2::3], strict=True)


@pytest.fixture
def connect(broker: RunningBroker) -> Iterator[Callable[[], TinyClient]]:
    """Opens connections that have said hello."""
    opened: list[TinyClient] = []

    def open_one() -> TinyClient:
        opened.append(TinyClient(broker.url))
        opened[-1].call(INFO, {"versions": [1, 1], "client": "tiny"})
        return opened[-1]

    yield open_one
    for client in opened:
        client.socket.close()


# The story


def test_a_client_written_from_the_page_produces_and_consumes(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    partitions = client.call(CREATE_TOPIC, {"topic": topic, "partitions": 4}).properties["partitions"]
    opened = client.call(
        SUBSCRIBE,
        {"stream": 1, "topic": topic, "subscription": "billing", "consumer": "c1", "mode": "key_shared"},
    )
    assert opened.properties["mode"] == "key_shared"
    sent: dict[str, list[str]] = {}
    ids = set()
    for number in range(40):
        key, uid = f"Kunde-{number % 7}-ü", uuid4().hex
        partition = zlib.crc32(key.encode()) % partitions
        about = f"{int(time.time() * 1000)}   {json.dumps({'number': str(number)})}"
        answer = client.call(PUBLISH, {"topic": topic, "partition": partition}, [key, uid, about]).properties
        ids.add(f"{partition}:{answer['ledger']}-{answer['first']}")
        sent.setdefault(key, []).append(uid)

    received: dict[str, list[str]] = {}
    while sum(map(len, received.values())) < 40:
        data = client.delivery()
        partition, token = data.properties["partition"], data.properties["token"]
        receipts: list[str | int] = []
        for entry, key, uid, about in messages_of(data):
            received.setdefault(key, []).append(uid)
            published_ms, _, _, _, attributes = about.split(" ", 4)
            assert int(published_ms) - 100 < data.timestamp_ms  # the worker reckons the time of Redis
            assert "number" in json.loads(attributes)
            ledger = [
                item for item in data.properties["ledgers"].split() if int(item.split(":")[1]) <= entry
            ][-1]
            ids.remove(f"{partition}:{ledger.split(':')[0]}-{entry}")
            receipts += [f"={key}", token, entry, entry]
        settled = client.call(ACK, {"stream": 1, "partition": partition}, receipts).properties
        assert settled.get("stale", []) == []
    assert (received, ids) == (sent, set())
    client.call(UNSUBSCRIBE, {"stream": 1})
    left = client.call(DESCRIBE_SUBSCRIPTION, {"topic": topic, "subscription": "billing"}).properties
    assert (left["backlog"], left.get("consumers", [])) == (0, [])


def test_a_nacked_message_comes_again_with_its_retry_count(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(SUBSCRIBE, {"stream": 7, "topic": topic, "subscription": "s", "consumer": "c1"})
    client.call(PUBLISH, {"topic": topic, "partition": 0}, ["", "uid-1", "1   "])
    first = client.delivery()
    [(entry, _, uid, _)] = messages_of(first)
    receipt = ["", first.properties["token"], entry, entry]
    client.call(NACK, {"stream": 7, "partition": 0, "delay_ms": 0}, receipt)
    second = client.delivery()
    assert [(row[0], row[2]) for row in messages_of(second)] == [(entry, uid)]
    assert second.body[2] == [entry, 1]
    assert second.properties["token"] > first.properties["token"]
    assert client.call(ACK, {"stream": 7, "partition": 0}, receipt).properties["stale"] == [0, entry, entry]


def test_publishing_a_uid_again_answers_with_the_first_id(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    request = {"topic": topic, "partition": 0}
    assert client.call(PUBLISH, request, ["", "uid-0", "1   "]).properties["unowed"] is True
    client.call(CREATE_SUBSCRIPTION, {"topic": topic, "subscription": "s"})
    first = client.call(PUBLISH, request, ["", "uid-1", "1   "]).properties
    again = client.call(PUBLISH, request, ["", "uid-2", "1   ", "", "uid-1", "1   "]).properties
    assert again["duplicates"] == {1: f"{first['ledger']}-{first['first']}"}
    assert again["first"] == first["first"] + 1


def test_who_acks_is_asked_to_delete_the_body_before_its_ack_is_answered(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    client.call(INFO, {"store": "own"})
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(SUBSCRIBE, {"stream": 1, "topic": topic, "subscription": "s", "consumer": "c1"})
    for number in range(1, 4):
        client.call(PUBLISH, {"topic": topic, "partition": 0}, ["", f"uid-{number}", "1  5 "])
        token = client.delivery().properties["token"]
        ack = {"stream": 1, "partition": 0, "bodies": [number, f"uid-{number}"]}
        sequence = client.send(ACK, ack, ["", token, number, number])
        asked, acked = client.receive(), client.receive()
        assert (asked.type, asked.properties, asked.body) == (
            DELETE_BODIES,
            {"topic": topic},
            [f"uid-{number}"],
        )
        assert (acked.type, acked.sequence) == (OK, sequence)
        client.socket.sendall(frame(OK, asked.sequence, {}))


def test_a_consumer_that_comes_back_under_its_name_gets_what_it_held(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    subscribe = {"stream": 1, "topic": topic, "subscription": "s", "consumer": "c1", "mode": "exclusive"}
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(SUBSCRIBE, subscribe)
    client.call(PUBLISH, {"topic": topic, "partition": 0}, ["", "uid-1", "1   "])
    before = client.delivery()
    client.socket.close()

    client = connect()
    client.call(SUBSCRIBE, subscribe)
    after = client.delivery()
    assert after.properties["held"] is True
    assert after.properties["token"] == before.properties["token"]
    assert after.body[:2] == before.body[:2]
    receipt = ["=", before.properties["token"], *before.body[0]]
    assert "stale" not in client.call(ACK, {"stream": 1, "partition": 0}, receipt).properties


def test_at_most_once_there_is_nothing_to_settle_and_permits_come_back_with_flow(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(CREATE_SUBSCRIPTION, {"topic": topic, "subscription": "s", "delivery": "at_most_once"})
    subscribe = {"stream": 1, "topic": topic, "subscription": "s", "consumer": "c1", "permits": 2}
    assert client.call(SUBSCRIBE, subscribe).properties["delivery"] == "at_most_once"
    for number in range(6):
        client.call(PUBLISH, {"topic": topic, "partition": 0}, ["", f"uid-{number}", "1   "])
    uids: list[str] = []
    while len(uids) < 6:
        data = client.delivery()
        assert isinstance(data.properties["settled"], list)
        found = [uid for _, _, uid, _ in messages_of(data)]
        assert len(found) <= 2
        uids += found
        client.send(FLOW, {"stream": 1, "permits": len(found)})
    assert uids == [f"uid-{number}" for number in range(6)]


def test_what_was_sent_behind_a_failed_publish_does_not_overtake_it(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    """There is no replica, so the first is refused; the others could be stored, and must not be before it."""
    client = connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(CREATE_SUBSCRIPTION, {"topic": topic, "subscription": "s", "mode": "exclusive"})
    place = {"topic": topic, "partition": 0}
    levels = {"uid-0": "memory", "uid-1": "replicated", "uid-2": "memory", "uid-3": "memory"}
    sequences = [
        client.send(PUBLISH, {**place, "durability": level}, ["", uid, "1   "])
        for uid, level in levels.items()
    ]
    stored, *refused = [client.receive() for _ in sequences]
    assert [answer.sequence for answer in (stored, *refused)] == sequences
    assert stored.type == OK
    for answer in refused:
        assert answer.type == ERROR
        assert answer.properties["code"] == "durability_not_reached"
        assert "stored" not in answer.properties
    with pytest.raises(Refused, match="durability_not_reached"):  # nobody has said that it is tried again
        client.call(PUBLISH, place, ["", "uid-4", "1   "])
    with pytest.raises(Refused, match="durability_not_reached"):  # tried, and refused for itself
        client.call(PUBLISH, {**place, "durability": "replicated", "again": True}, ["", "uid-1", "1   "])

    client.send(PUBLISH, {**place, "again": True}, ["", "uid-1", "1   "])
    for uid in ("uid-2", "uid-3", "uid-4"):
        client.send(PUBLISH, place, ["", uid, "1   "])
    answers = [client.receive() for _ in range(4)]
    entries = [answer.properties["first"] for answer in (stored, *answers)]
    assert entries == list(range(entries[0], entries[0] + 5)), "each is stored once, behind the one before"
    assert not any(answer.properties.get("duplicates") for answer in answers)
    client.call(SUBSCRIBE, {"stream": 1, "topic": topic, "subscription": "s", "consumer": "c1"})
    uids: list[str] = []
    while len(uids) < 5:
        uids += [uid for _, _, uid, _ in messages_of(client.delivery())]
    assert uids == [f"uid-{number}" for number in range(5)]


@pytest.mark.slow
def test_silence_is_broken_by_heartbeats_and_ended_by_hanging_up() -> None:
    with RunningBroker(heartbeat=1.0) as broker, TinyClient(broker.url) as client:
        assert client.call(INFO, {}).properties["heartbeat_ms"] == 1_000
        assert client.call(HEARTBEAT, {}).type == OK
        assert {client.hear().type for _ in range(3)} == {HEARTBEAT}
        client.polite = False
        with pytest.raises((EOFError, ConnectionError)):
            client.receive()


def test_a_consumer_is_told_why_it_ends(connect: Callable[[], TinyClient], topic: str) -> None:
    client, other = connect(), connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 2})
    subscribe = {"topic": topic, "subscription": "s", "consumer": "c1"}

    def told() -> tuple[int, int, str]:
        ended = client.receive()
        return ended.sequence, ended.properties["stream"], ended.properties["code"]

    client.call(SUBSCRIBE, {**subscribe, "stream": 1})
    other.call(SUBSCRIBE, {**subscribe, "stream": 1})
    assert told() == (0, 1, "consumer_replaced")
    other.call(UNSUBSCRIBE, {"stream": 1})

    client.call(SUBSCRIBE, {**subscribe, "stream": 2})
    other.call(DELETE_SUBSCRIPTION, {"topic": topic, "subscription": "s"})
    assert told() == (0, 2, "subscription_not_found")

    client.call(SUBSCRIBE, {**subscribe, "stream": 3})
    other.call(DELETE_TOPIC, {"topic": topic})
    assert told() == (0, 3, "topic_not_found")
    with pytest.raises(Refused, match="invalid_argument"):
        client.call(UNSUBSCRIBE, {"stream": 3})


def test_a_paused_consumer_gets_nothing_until_it_goes_on(
    connect: Callable[[], TinyClient], topic: str
) -> None:
    client = connect()
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(SUBSCRIBE, {"stream": 1, "topic": topic, "subscription": "s", "consumer": "c1"})
    client.send(FLOW, {"stream": 1, "paused": True})
    for number in range(3):
        client.call(PUBLISH, {"topic": topic, "partition": 0}, ["", f"uid-{number}", "1   "])
        described = client.call(DESCRIBE_SUBSCRIPTION, {"topic": topic, "subscription": "s"}).properties
        assert (described["fresh"], described["leased"]) == (number + 1, 0)
    assert not client.deliveries
    client.send(FLOW, {"stream": 1, "paused": False})
    assert [uid for _, _, uid, _ in messages_of(client.delivery())] == ["uid-0", "uid-1", "uid-2"]


def test_a_client_of_another_age_is_told_so_and_hung_up_on(broker: RunningBroker) -> None:
    with TinyClient(broker.url) as client:
        with pytest.raises(Refused, match="incompatible_version"):
            client.call(INFO, {"versions": [7, 9]})
        with pytest.raises(EOFError):
            client.receive()


def test_numbers_and_names_that_cannot_be_are_refused(connect: Callable[[], TinyClient], topic: str) -> None:
    """Nobody deletes from a store that no client can mean; and no worker says a number over 2^53 - 1."""
    client = connect()
    with pytest.raises(Refused, match="invalid_argument"):
        client.call(INFO, {"store": "advertized"})
    client.call(CREATE_TOPIC, {"topic": topic, "partitions": 1})
    client.call(CREATE_SUBSCRIPTION, {"topic": topic, "subscription": "s"})
    for subscription in ("", "s"):
        with pytest.raises(Refused, match="invalid_argument"):
            client.call(PURGE, {"topic": topic, "subscription": subscription, "number": 2**63 - 1})


def test_the_log_of_the_worker_says_whose_connection_it_was(broker: RunningBroker) -> None:
    with TinyClient(broker.url) as client:
        client.call(INFO, {"client": "tiny\nclient 7"})
        client.socket.sendall(b"\xff" * 64)
        assert client.receive().properties["code"] == "protocol_error"
    assert "'tiny\\nclient 7' breaks the protocol" in broker.log()


# The page's own session


def page_session() -> list[bytes]:
    """The frames of the page's session, in order."""
    session = PAGE.read_text("utf-8").partition("\n## A session, byte by byte\n")[2]
    blocks = re.findall(r"^```hex \w+\n(.*?)^```$", session, re.MULTILINE | re.DOTALL)
    return [bytes.fromhex("".join(line[:48] for line in block.splitlines())) for block in blocks]


OF_THE_DAY = {
    *("worker", "workers", "release", "payloads", "time_ms", "published_ms", "token", "deadline_ms"),
    *("heartbeat_ms", "session_ms", "payload_lifetime_ms", "max_frame", "ledger", "ledgers", "epochs"),
    *("incarnation", "subscription_incarnation", "payloads_beside"),
}
REPEATED = {"token", "incarnation"}


def timeless(received: Received) -> tuple[Any, ...]:
    """What is the same on every day and under all settings; in texts, without the broker's time."""
    properties = {name: value for name, value in received.properties.items() if name not in OF_THE_DAY}
    body = re.sub(r"'\d{13} (\d{13}) ", r"'\1 ", repr(received.body))
    return received.type, received.sequence, properties, body


def test_the_session_of_the_page_goes_as_it_is_written(broker: RunningBroker) -> None:
    """The client's frames are sent as they stand, but for the topic's name and numbers that it was told."""
    name = f"t{uuid4().hex[:5]}".encode()
    numbers: dict[bytes, bytes] = {}  # as the page has them, and as they are
    with TinyClient(broker.url) as client:
        for data in page_session():
            shown = unpack_frame(data[4:])
            if shown.type not in (OK, DATA):
                data = data.replace(b"orders", name)
                for of_the_page, told in numbers.items():
                    data = data.replace(of_the_page, told)
                client.socket.sendall(data)
                continue
            received = client.receive()
            assert timeless(received) == timeless(shown)
            for number in REPEATED & received.properties.keys():
                numbers[packed(shown, number)] = packed(received, number)


def packed(received: Received, number: str) -> bytes:
    """A number as it is on the wire."""
    return struct.pack(">Q", received.properties[number])
