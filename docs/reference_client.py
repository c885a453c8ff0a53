"""A small client for Keylane: the standard library and msgpack, written from docs/protocol.md alone.

    client = Client("127.0.0.1:9999")
    client.ask(CREATE_TOPIC, topic="orders", partitions=4)
    client.ask(CREATE_SUBSCRIPTION, topic="orders", subscription="billing", mode="key_shared")
    client.publish("orders", [("customer-7", b"42")])
    with Consumer(client, "orders", "billing") as consumer:
        while message := consumer.receive(timeout=5):
            print(message.key, consumer.body(message))
            consumer.ack(message)

It does one thing at a time, and when anything goes wrong begins anew: asks for the map, connects, subscribes
under its name, and takes what is listed as held for all that it has. It leaves out what the page says can be,
and keeps bodies in a plain Redis. Who needs longer than two heartbeats for a message calls breathe().
"""

import contextlib
import itertools
import json
import os
import random
import select
import socket
import struct
import time
import zlib
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgpack

DATA, ACK, HEARTBEAT, CREATE_TOPIC, SUBSCRIBE, UNSUBSCRIBE, PUBLISH, INFO, NACK = range(1, 10)
REDIRECT, ERROR, OK, CREATE_SUBSCRIPTION, ENDED = 12, 13, 14, 18, 35
RETRIABLE = {"unavailable", "overloaded", "fenced", "backlog_full", "durability_not_reached"}
PATIENCE = 30.0  # seconds for anything to succeed
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Frame = namedtuple("Frame", "type sequence properties body")
Message = namedtuple("Message", "partition lane token entry id key uid about retries")


class Refused(Exception):
    """The worker said no, for good: code, message."""


class Trouble(Exception):
    """Something that passes: ask for the map, and try again."""


def new_name() -> str:
    """A KSUID: seconds since 1400000000 in 4 bytes and 16 random bytes, in base 62, 27 digits."""
    number = int(time.time()) - 1_400_000_000 << 128 | int.from_bytes(os.urandom(16), "big")
    return "".join(DIGITS[number // 62**place % 62] for place in reversed(range(27)))


def dial(host: str, port: str | int) -> socket.socket:
    """A connection."""
    try:
        return socket.create_connection((host, int(port)), timeout=5)
    except OSError as error:
        raise Trouble(f"{host}:{port}: {error}") from error


class Link:
    """A connection to one worker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = dial(*address.rsplit(":", 1))
        self.frames: deque[Frame] = deque()  # that came, and nobody has asked for yet
        self.data, self.sequence, self.beat = b"", 0, 10.0
        self.heard = self.sent = time.monotonic()
        try:
            self.info = self.ask(INFO, {"versions": [1, 1], "client": "reference"}).properties
        except BaseException:
            self.socket.close()
            raise
        self.beat = self.info["heartbeat_ms"] / 1000

    def send(self, type: int, properties: dict[str, Any], body: Any = None, sequence: int = 0) -> int:
        """Send a frame; answers its sequence."""
        if type != OK:
            sequence = self.sequence = self.sequence + 1
        packed, payload = msgpack.packb(properties), msgpack.packb(body) if body is not None else b""
        head = struct.pack(">IIQQI", 28 + len(packed) + len(payload), type, sequence, 0, len(packed))
        try:
            self.socket.sendall(head + packed + struct.pack(">I", len(payload)) + payload)
        except OSError as error:
            raise Trouble(f"{self.address}: {error}") from error
        self.sent = time.monotonic()
        return sequence

    def read(self) -> None:
        """Take what has come; call it when there is something, or the time for a heartbeat has come."""
        now = time.monotonic()
        if select.select([self.socket], [], [], 0)[0]:
            part = b""
            with contextlib.suppress(OSError):
                part = self.socket.recv(1 << 20)
            if not part:
                raise Trouble(f"{self.address} has closed the connection")
            self.heard = now
            self._cut(self.data + part)
        if now - self.heard > 3 * self.beat:
            raise Trouble(f"{self.address} is silent")
        if now - self.sent > self.beat / 2:
            self.send(HEARTBEAT, {})

    def _cut(self, data: bytes) -> None:
        while len(data) >= 4 and len(data) >= (end := 4 + struct.unpack_from(">I", data)[0]):
            type, sequence, _, size = struct.unpack_from(">IQQI", data, 4)
            properties, body, data = data[28 : 28 + size], data[32 + size : end], data[end:]
            if type == HEARTBEAT:
                self.send(OK, {}, sequence=sequence)
                continue
            parts = (properties or b"\x80", body or b"\xc0")  # an empty map, and nil
            unpacked = [msgpack.unpackb(part, strict_map_key=False) for part in parts]
            self.frames.append(Frame(type, sequence, *unpacked))
        self.data = data

    def ask(self, type: int, properties: dict[str, Any], body: Any = None) -> Frame:
        """Send a request and wait for its answer; Refused or Trouble if that is not OK."""
        sequence = self.send(type, properties, body)
        while True:
            for frame in self.frames:
                if frame.sequence == sequence and frame.type in (OK, ERROR, REDIRECT):
                    self.frames.remove(frame)
                    return checked(frame)
                if frame.type == ERROR and not frame.sequence and frame.properties.get("stream") is None:
                    raise Trouble(f"{self.address} ends the connection: {frame.properties['message']}")
            select.select([self.socket], [], [], self.beat / 4)
            self.read()


def checked(frame: Frame) -> Frame:
    """An OK; else what it is, as an exception."""
    if frame.type == ERROR:
        code, message = frame.properties["code"], frame.properties["message"]
        raise Trouble(message) if code in RETRIABLE else Refused(code, message)
    if frame.type == REDIRECT:
        raise Trouble(f"partition {frame.properties['partition']} is elsewhere")
    return frame


def redis(url: str, *commands: list[Any]) -> list[Any]:
    """What a plain Redis, which is the payload store, answers to commands; over a connection of their own."""
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.username or parts.password:
        raise ValueError(f"this client knows redis://host:port/db, not {parts.scheme}://")
    data, asked = b"", [["SELECT", parts.path.strip("/") or "0"], *commands]
    for command in asked:
        words = [part if isinstance(part, bytes) else str(part).encode() for part in command]
        data += b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    try:
        with dial(parts.hostname or "127.0.0.1", parts.port or 6379) as line, line.makefile("rb") as file:
            line.sendall(data)
            return [answer_in(file) for _ in asked][1:]
    except OSError as error:
        raise Trouble(f"the payload store: {error}") from error


def answer_in(file: Any) -> Any:
    """The next answer of Redis."""
    kind, rest = (line := file.readline())[:1], line[1:-2]
    if kind == b"-" or not kind:
        raise OSError(rest.decode() or "Redis has closed the connection")
    if kind == b"$":
        return None if rest == b"-1" else file.read(int(rest) + 2)[:-2]
    return [answer_in(file) for _ in range(int(rest))] if kind == b"*" else rest


def insist(step: Callable[[bool], Any], mend: Callable[[], object]) -> Any:
    """Take a step, which is told whether it is another attempt, until it succeeds or patience ends."""
    end = time.monotonic() + PATIENCE
    for attempt in itertools.count():
        try:
            return step(attempt > 0)
        except Trouble as trouble:
            if time.monotonic() > end:
                raise TimeoutError(str(trouble)) from trouble
        time.sleep(min(0.02 * 2**attempt, 1.0) * random.uniform(0.5, 1.0))
        mend()


class Client:
    """A producer, and whom consumers ask for the map and for bodies."""

    def __init__(self, seeds: str) -> None:
        self.seeds = seeds.split(",")
        self.links: dict[str, Link] = {}  # by address

    def close(self) -> None:
        """Hang up; what is asked next connects anew."""
        for link in self.links.values():
            link.socket.close()
        self.links.clear()

    def ask(self, type: int, **properties: Any) -> Any:
        """Ask any worker; what is to be made may be there already."""
        properties = {"exist_ok": True, **properties}
        return insist(lambda _: self._link(*self.seeds).ask(type, properties).properties, self.close)

    def publish(self, topic: str, messages: Iterable[tuple[str, bytes]], **attributes: str) -> list[str]:
        """Publish up to 1,000 messages, each a key and a body; their ids, "" for what nobody is owed."""
        incarnation, owners = insist(lambda _: self.map(topic), self.close)
        said, messages = json.dumps(attributes) if attributes else "", list(messages)
        texts, uids, ids, commands = dict[int, list[str]](), list[str](), dict[str, str](), list[list[Any]]()
        for key, body in messages:
            uid = new_name()  # once: a retry has the same
            about = f"{int(time.time() * 1000)}  {len(body) or ''} {said}"
            texts.setdefault(zlib.crc32((key or uid).encode()) % len(owners), []).extend((key, uid, about))
            uids.append(uid)
            if body:  # an empty one is none
                commands.append(["HSET", f"kl:bodies:{topic}:{uid[:6]}", uid, body])
        self.bodies(*commands)
        try:
            for partition, flat in texts.items():
                meant = {"topic": topic, "partition": partition, "incarnation": incarnation}
                ids.update(zip(flat[1::3], self._publish(meant, flat), strict=True))
        except Refused as refused:
            if refused.args[0] == "topic_replaced":  # what was stored is gone: all of it once more, as if new
                return self.publish(topic, messages, **attributes)
            raise
        return [ids[uid] for uid in uids]

    def _publish(self, meant: dict[str, Any], texts: list[str]) -> list[str]:
        def step(again: bool) -> Frame:
            _, owners = self.map(meant["topic"])
            owner = self._link(owners[meant["partition"] % len(owners)])  # any will do if it is another topic
            return owner.ask(PUBLISH, {**meant, "again": again}, texts)

        reply, count = insist(step, self.close).properties, len(texts) // 3
        if reply.get("full"):
            raise Refused("backlog_full", f"no room for {len(reply['full'])} of {count} messages")
        if reply.get("unowed"):
            return [""] * count
        first = itertools.count(reply["first"])
        known = reply.get("duplicates", {}) | dict.fromkeys(reply.get("unmatched", []), "")
        ids = [known[at] if at in known else f"{reply['ledger']}-{next(first)}" for at in range(count)]
        return [id and f"{meant['partition']}:{id}" for id in ids]

    def bodies(self, *commands: list[Any]) -> list[Any]:
        """What the payload store that the cluster advertises answers; what is written expires one day."""

        def step(_: bool) -> list[Any]:
            info = self._link(*self.seeds).info
            expire = [["PEXPIRE", it[1], info["payload_lifetime_ms"]] for it in commands if it[0] == "HSET"]
            return redis(info["payloads"], ["MULTI"], *commands, *expire, ["EXEC"])[-1]

        return insist(step, self.close) if commands else []

    def map(self, topic: str) -> tuple[int, list[str]]:
        """The topic's incarnation, and the address of each partition's owner; Trouble while one has none."""
        info = self._link(*self.seeds).ask(INFO, {"topic": topic}).properties
        if -1 in (owners := info.get("owners") or [-1]):
            raise Trouble(f"some partitions of {topic} have no owner")
        return info["incarnation"], [info["workers"][owner]["address"] for owner in owners]

    def _link(self, *addresses: str) -> Link:
        """A connection to one of these workers."""
        for address in sorted(addresses, key=lambda address: (address not in self.links, random.random())):
            with contextlib.suppress(Trouble):
                if address not in self.links:
                    self.links[address] = Link(address)
                self.links[address].read()
                return self.links[address]
            if address in self.links:
                self.links.pop(address).socket.close()
        raise Trouble(f"no worker can be reached of {addresses}")


class Consumer:
    """Messages of a subscription, one at a time."""

    def __init__(self, client: Client, topic: str, subscription: str, name: str = "", permits: int = 100):
        self.client, self.topic, self.permits, self.mode = client, topic, permits, ""
        self.who = dict[str, Any](topic=topic, subscription=subscription, consumer=name or new_name())
        self.links, self.waiting = dict[int, Link](), deque[Message]()  # links by partition
        self.handed: set[tuple[int, int, int]] = set()  # partition, token, entry of what the application has

    def __enter__(self) -> "Consumer":
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        for link in set(self.links.values()):
            with contextlib.suppress(Trouble, Refused):  # else it goes back when its session ends
                link.ask(UNSUBSCRIBE, {"stream": 1})
        self._hang_up()

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None."""
        end = time.monotonic() + timeout
        self.breathe()  # what is there may be void by now
        while not self.waiting:
            if time.monotonic() > end:
                return None
            self.breathe(end - time.monotonic())
        message = self.waiting.popleft()
        self.handed.add((message.partition, message.token, message.entry))
        return message

    def body(self, message: Message) -> bytes:
        """The body of a message."""
        size, _, name = message.about.split(" ", 4)[3].partition(":")
        name = name or message.uid
        [found] = self.client.bodies(["HGET", f"kl:bodies:{self.topic}:{name[:6]}", name]) if size else [b""]
        if found is None:
            raise KeyError(f"the body of {message.id} is gone")
        return found

    def ack(self, message: Message) -> bool:
        """Settle a message for good; False if its lease had ended."""
        return "stale" not in self._settle(ACK, message, {})

    def nack(self, message: Message, delay_ms: int = 0) -> bool:
        """Give a message back, and the later ones of its lane with it; False if its lease had ended."""
        reply = self._settle(NACK, message, {"delay_ms": delay_ms})
        self.breathe()  # what came before the answer is in it, too
        self._drop(message.partition, reply.get("returned", []))
        return "stale" not in reply

    def breathe(self, timeout: float = 0.0) -> None:
        """Take what has come, waiting for it if need be, and show that we are there."""
        links = set(self.links.values())
        try:
            if not any(link.frames for link in links):
                wait = max(0.0, min(timeout, *(link.beat / 4 for link in links)))
                select.select([link.socket for link in links], [], [], wait)
            for link in links:
                link.read()
                while link.frames:
                    self._take(link.frames.popleft())
        except Trouble:
            self._begin()

    def _settle(self, type: int, message: Message, more: dict[str, Any]) -> dict[Any, Any]:
        """Ask until there is an answer, of whoever has the partition; nothing is handed out meanwhile."""
        receipt = [message.lane, message.token, message.entry, message.entry]
        properties = {"stream": 1, "partition": message.partition, **more}
        reply = insist(lambda _: self.links[message.partition].ask(type, properties, receipt), self._begin)
        self.handed.discard((message.partition, message.token, message.entry))
        return reply.properties

    def _begin(self) -> None:
        """Subscribe with every owner, under the same name: they list what is ours, and the rest is void."""
        self._hang_up()
        insist(lambda _: self._subscribe(*self.client.map(self.topic)), self._hang_up)

    def _hang_up(self) -> None:
        while self.links:
            self.links.popitem()[1].socket.close()
        self.waiting.clear()

    def _subscribe(self, incarnation: int, owners: list[str]) -> None:
        self.who.setdefault("incarnation", incarnation)  # what comes after has to be of the same topic
        for address in dict.fromkeys(owners):  # that of the lowest partition first
            link = Link(address)
            partitions = [number for number, owner in enumerate(owners) if owner == address]
            self.links.update(dict.fromkeys(partitions, link))
            how = {"stream": 1, "partitions": partitions, "permits": max(1, self.permits // len(set(owners)))}
            reply = link.ask(SUBSCRIBE, {**self.who, **how}).properties
            self.mode, self.who["subscription_incarnation"] = reply["mode"], reply["subscription_incarnation"]

    def _take(self, frame: Frame) -> None:
        """Look at what a worker has pushed."""
        if frame.type == DATA:
            self.waiting += self._unpack(frame)
        elif frame.type == ENDED:
            self._drop(frame.properties["partition"], frame.body or [], frame.properties.get("up_to", 0))
        elif frame.type in (ERROR, REDIRECT) and not frame.sequence:
            checked(frame)  # a partition has moved, or the consumer has ended

    def _unpack(self, frame: Frame) -> Iterator[Message]:
        partition, token = frame.properties["partition"], frame.properties["token"]
        ledgers = [item.split(":") for item in frame.properties["ledgers"].split()]
        ranges, texts, retries, _ = frame.body
        counts = dict(zip(retries[::2], retries[1::2], strict=True))
        entries = [n for a, b in zip(ranges[::2], ranges[1::2], strict=True) for n in range(a, b + 1)]
        for entry, key, uid, about in zip(entries, texts[::3], texts[1::3], texts[2::3], strict=True):
            if (partition, token, entry) in self.handed:
                continue  # listed again: the application has it
            ledger = [name for name, first in ledgers if int(first) <= entry][-1]
            ordered = self.mode != "shared" and (key or self.mode != "key_shared")
            lane = "" if not ordered else "=" + key if self.mode == "key_shared" else "="
            id = f"{partition}:{ledger}-{entry}"
            yield Message(partition, lane, token, entry, id, key, uid, about, counts.get(entry, 0))

    def _drop(self, partition: int, leases: list[int], up_to: int = 0) -> None:
        """Leases of a partition have ended: token, first, last, …, or all up to a token."""
        parts = list(zip(leases[::3], leases[1::3], leases[2::3], strict=True))

        def ended(one: Message) -> bool:
            listed = any(one.token == token and first <= one.entry <= last for token, first, last in parts)
            return one.partition == partition and (listed or one.token <= up_to)

        self.waiting = deque(message for message in self.waiting if not ended(message))
