"""What somebody tries who has a token, and few rights: to reach other topics, or to stay when it ends."""

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis

from keylane import Client, Forbidden, OutgoingMessage, TopicNotFound, ksuid, wire
from keylane_broker.access.actions import NEEDS
from keylane_broker.http.operations import OPERATIONS
from keylane_broker.worker.requests.table import HANDLERS
from tests.support.peer import Refused, Stream, connect, receipts
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # many who wait to be cut off

ADMIN = "the token of an administrator"
SOON = 60.0
SECRET = b"a secret"
SHOWN = (SECRET, base64.b64encode(SECRET))


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, auth=True, admin_token=ADMIN, partition_lease=1.0) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(guarded: RunningBroker) -> Iterator[Client]:
    with Client(guarded.url, token=ADMIN) as client:
        yield client


@pytest.fixture
def own(admin: Client, topic: str) -> str:
    """A topic that the intruder may use, with a subscription."""
    admin.create_topic(topic, partitions=1)
    admin.create_subscription(topic, "s")
    return topic


@pytest.fixture
def other(admin: Client, topic: str) -> str:
    """A topic that is none of their business."""
    name = f"other-{topic}"
    admin.create_topic(name, partitions=1)
    admin.create_subscription(name, "s")
    return name


def http(broker: RunningBroker, token: str) -> httpx.Client:
    return httpx.Client(
        base_url=broker.http_urls[0], headers={"Authorization": f"Bearer {token}"}, timeout=SOON
    )


def test_dead_letters_go_only_where_one_may_publish(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    token = admin.create_token("reader", [f"consume:{own}", f"admin:mine-{own}", f"produce:kept-{own}"]).token
    admin.create_topic(f"mine-{own}", partitions=1)
    admin.create_subscription(f"mine-{own}", "s")
    with Client(guarded.url, token=token) as client, http(guarded, token) as web:
        with pytest.raises(Forbidden, match=f"produce:{other}"):
            client.create_subscription(own, "evil", max_retries=0, dead_letter=other)
        with pytest.raises(Forbidden, match=f"produce:{other}"):
            client.change_subscription(f"mine-{own}", "s", dead_letter=other)
        said = {"name": "evil", "max_retries": 0, "dead_letter": other}
        assert web.post(f"/v1/topics/{own}/subscriptions", json=said).status_code == 403
        said = {"dead_letter": other}
        assert web.patch(f"/v1/topics/mine-{own}/subscriptions/s", json=said).status_code == 403
        client.create_subscription(own, "usual", dead_letter=f"{own}.dead")
        client.create_subscription(own, "elsewhere", dead_letter=f"kept-{own}")
    assert admin.describe_topic(own).subscriptions == ["elsewhere", "s", "usual"]


async def test_a_forged_dead_letter_is_not_redriven_into_another_topic(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    token = admin.create_token("owner", [f"admin:{own}"]).token
    history = {"dead.id": "0:1-1", "dead.topic": other, "dead.subscription": "s", "dead.reason": "none"}
    with Client(guarded.url, token=token) as client:
        forged = await asyncio.to_thread(client.publish, own, b"forged", attributes=history)
        garbled = [
            await asyncio.to_thread(client.publish, own, b"garbled", attributes=attributes)
            for attributes in (
                {"dead.id": "x"},
                {**history, "dead.topic": "no name"},
                {**history, "dead.id": "x"},
            )
        ]
    async with connect(guarded.urls[0], token) as peer:
        withdraw = wire.Withdraw(own, 0, False)
        with pytest.raises(Refused, match="forbidden"):
            await peer.answer(withdraw, wire.pack([forged.entry]))
        entries = wire.pack([one.entry for one in garbled])
        assert (await peer.ask(withdraw, wire.WithdrawReply, entries)).taken == 0
    assert admin.peek(other, "s") == []
    assert admin.describe_topic(own).messages == 4


async def test_an_ack_does_not_delete_bodies_of_another_topic(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    token = admin.create_token("reader", [f"consume:{own}", f"observe:{other}"]).token
    for topic in (other, own, own):
        await asyncio.to_thread(admin.publish, topic, b"a body")
    [theirs] = await asyncio.to_thread(admin.peek, other, "s")
    async with connect(guarded.urls[0], token) as peer:
        stream = Stream(peer, own, "s", "c")
        await stream.open()
        first, second = await stream.receive(2)
        for item in (first, second):
            bodies: list[int | str] = [item.entry, f"@{other}/{theirs.uid}"]
            await peer.answer(wire.Ack(stream.number, 0, bodies), receipts("shared", item))
    wait_until(lambda: not names_of_bodies(guarded, own))
    assert names_of_bodies(guarded, other) == [theirs.uid]


async def test_a_producer_keeps_nobody_from_settling_by_the_name_of_a_body(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    token = admin.create_token("writer", [f"produce:{own}"]).token
    flat = ["", "a", f"1  5:{'n' * 1_000} ", "", "b", wire.pack_about(1)]
    async with connect(guarded.urls[0], token) as peer:
        await peer.answer(wire.Publish(own, 0), wire.pack(flat))

    def settle_both() -> list[str]:
        with admin.subscribe(own, "s") as consumer:
            return list(consumer.ack([consumer.receive(SOON) for _ in range(2)]))

    assert await asyncio.to_thread(settle_both) == ["settled"] * 2


def names_of_bodies(broker: RunningBroker, topic: str) -> list[str]:
    with redis.Redis.from_url(broker.redis_url, decode_responses=True) as connection:
        return [
            name for key in connection.scan_iter(f"kl:bodies:{topic}:*") for name in connection.hkeys(key)
        ]


def test_an_error_names_no_topic_that_is_not_to_be_seen(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    wrong = other[:-1]
    token = admin.create_token("guesser", [f"admin:{wrong}"]).token
    with Client(guarded.url, token=token) as client, http(guarded, token) as web:
        with pytest.raises(TopicNotFound) as refused:
            client.describe_topic(wrong)
        with pytest.raises(TopicNotFound) as unpublished:
            client.publish(wrong, b"1")
        answers = [
            web.get(f"/v1/topics/{wrong}"),
            web.post(f"/v1/topics/{wrong}/messages", json={"messages": [{"data": "1"}, {"data": "2"}]}),
        ]
    assert answers[0].json()["code"] == "topic_not_found"
    for text in (str(refused.value), str(unpublished.value), *(answer.text for answer in answers)):
        assert f"no topic '{wrong}'" in text
        assert other not in text
    with pytest.raises(TopicNotFound, match=f"did you mean '{other}'"):
        admin.describe_topic(wrong)


async def test_a_consumer_goes_with_the_token_that_let_it_in(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    made = admin.create_token("reader", [f"consume:{own}"])
    another = admin.create_token("another", ["observe:nothing"])
    async with connect(guarded.urls[0], made.token) as peer:
        await peer.ask(wire.Info(token=another.token), wire.InfoReply)  # it has no consumers yet
        await peer.ask(wire.Info(token=made.token, topic=own), wire.InfoReply)
        await Stream(peer, own, "s", "c").open()
        with pytest.raises(Refused, match="forbidden"):
            await peer.answer(wire.Info(token=another.token))
        await peer.ask(wire.Info(token=made.token), wire.InfoReply)
        admin.revoke_token(made.id)
        said = await peer.push(wire.Error)
        assert said.code == "unauthorized"


@pytest.mark.slow
def test_what_is_under_way_by_http_ends_with_its_token(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    made = admin.create_token("reader", [f"admin:{own}*"])
    quiet = f"/v1/topics/{own}-quiet"
    admin.create_topic(f"{own}-quiet", partitions=1)
    admin.create_subscription(f"{own}-quiet", "s")
    ended = threading.Event()

    def lines() -> Iterator[bytes]:
        while not ended.wait(0.05):
            yield b'{"data": "again and again"}\n' * 500  # published at once

    with (
        http(guarded, made.token) as web,
        ThreadPoolExecutor() as threads,
        web.stream("GET", f"/v1/topics/{own}/subscriptions/s/events") as events,
    ):
        poll = threads.submit(web.post, f"{quiet}/subscriptions/s/lease", json={"wait": 60})
        kind = {"Content-Type": "application/x-ndjson"}
        stream = threads.submit(web.post, f"/v1/topics/{own}/messages", content=lines(), headers=kind)
        received = events.iter_lines()
        try:
            while not next(received).startswith("data: "):
                pass
            wait_until(lambda: "http-worker-0" in admin.describe_subscription(f"{own}-quiet", "s").consumers)
            admin.revoke_token(made.id)
            *_, event, problem, end = received
            assert (event, end) == ("event: error", "")  # it ends as a stream should
            assert json.loads(problem.removeprefix("data: "))["code"] == "unauthorized"
            for answer in (poll.result(SOON), stream.result(SOON)):
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        finally:
            ended.set()
    assert "Traceback" not in guarded.log()


def test_a_body_that_ends_with_its_token_is_seen_not_to_be_whole(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    made = admin.create_token("reader", [f"consume:{own}"])
    [name] = ksuid.take(1, 0.0)
    where = f"/v1/bodies/{own}/{name}"
    with http(guarded, ADMIN) as web:
        assert web.put(where, content=b"x" * 40_000_000).status_code == 200
    cut_off = f"the answer to GET {where} is cut off"
    with http(guarded, made.token) as web, web.stream("GET", where) as answer:
        parts = answer.iter_raw()
        next(parts)
        admin.revoke_token(made.id)
        wait_until(lambda: cut_off in guarded.log())
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)


def test_an_event_id_that_is_none_is_refused(guarded: RunningBroker, admin: Client, own: str) -> None:
    with http(guarded, ADMIN) as web:
        answer = web.get(f"/v1/topics/{own}/subscriptions/s/events", headers={"Last-Event-ID": "none"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert "Traceback" not in guarded.log()


async def test_what_an_error_quotes_is_cut_off(guarded: RunningBroker, admin: Client, own: str) -> None:
    token = admin.create_token("talker", [f"consume:{own}"]).token
    long = "\x01" * 4_000_000  # four times as long where it is quoted
    async with connect(guarded.urls[0], token) as peer:
        for request in (
            wire.DescribeTopic(long),
            wire.Subscribe(1, own, "s", "c", mode=long),
            wire.Subscribe(1, own, "s", "c", filter={long: "x"}),
        ):
            answer = await peer.begin(request)
            assert answer.type == wire.Type.ERROR
            assert len(answer.properties) < 10_000


async def test_a_number_of_thousands_of_digits_is_refused_like_any_other(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    digits = "9" * 5_000
    async with connect(guarded.urls[0], ADMIN) as peer:
        publish = wire.Publish(own, 0, durability=f"replicated:{digits}")
        with pytest.raises(Refused, match="invalid_argument"):
            await peer.answer(publish, wire.pack(["", "uid", "1   "]))
        await peer.echo()  # others may have requests on this connection
    with http(guarded, ADMIN) as web:
        said = {"messages": [{"data": "1", "durability": f"replicated:{digits}"}]}
        for answer in (
            web.post(f"/v1/topics/{own}/messages", json=said),
            web.post(f"/v1/topics/{own}/partitions/{digits}/move", json={"worker": "worker-0"}),
            web.get(f"/v1/topics/{own}/subscriptions/s/peek", params={"partition": digits}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
        explained = web.get(f"/v1/topics/{own}/subscriptions/s/explain", params={"id": f"{digits}:1-1"})
        assert explained.status_code < 500
    assert "Traceback" not in guarded.log()


def test_a_forged_dead_letter_does_not_hide_the_others(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    history = {"topic": own, "subscription": "s", "id": "0:1-1", "uid": "u", "retries": "1", "reason": "none"}
    history |= {"consumer": "c", "last_at": "1"}
    admin.create_topic(f"{own}.dead", partitions=1)
    admin.create_subscription(f"{own}.dead", "s")
    for first_at in ("1", "9" * 14, "9" * 20, "9" * 400):
        forged = {f"dead.{name}": value for name, value in {**history, "first_at": first_at}.items()}
        admin.publish(f"{own}.dead", b"", attributes=forged)
    assert [letter.first_failed_at.year for letter in admin.dead_letters(own)] == [1970, 5138]
    assert admin.purge_dead_letters(own) == 2


def test_http_reads_bodies_of_dead_letters_to_those_who_may_read_where_they_are(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    dead = f"{own}.dead"
    admin.create_topic(dead, partitions=1)
    for name in ("x", "y"):
        admin.create_subscription(dead, name)
    admin.create_subscription(own, "fails", max_retries=0)
    admin.publish(own, b"none of their business")
    with admin.subscribe(own, "fails") as consumer:
        consumer.receive(timeout=SOON).nack(delay=0)
    wait_until(lambda: admin.describe_subscription(dead, "y").backlog)
    for grants, name, data, status in (
        ([f"consume:{dead}"], "x", None, 403),
        ([f"consume:{own}*"], "y", "none of their business", 200),
    ):
        with http(guarded, admin.create_token("reader", grants).token) as web:
            said = {"wait": 30}
            place = f"/v1/topics/{dead}/subscriptions/{name}"
            [peeked] = web.get(f"{place}/peek", params={"bodies": True}).json()
            [message] = web.post(f"{place}/lease", json=said).json()["messages"]
            assert message.get("data") == peeked.get("data") == data
            assert message.get("body") == peeked.get("body")
            where = message.get("body") or f"/v1/bodies/{own}/{names_of_bodies(guarded, own)[0]}"
            assert web.get(where).status_code == status


def test_who_may_only_observe_peeks_without_bodies(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    for topic in (own, other):
        admin.publish(topic, b"a secret")
    for grants, code in (([f"observe:{own}", f"consume:{other}"], "forbidden"), ([f"consume:{own}"], "")):
        with http(guarded, admin.create_token("reader", grants).token) as web:
            place = f"/v1/topics/{own}/subscriptions/s/peek"
            [peeked] = web.get(place).json()
            assert "data" not in peeked
            answer = web.get(place, params={"bodies": True})
            assert (answer.json()["code"] if code else "") == code
            assert ("a secret" in answer.text) is not bool(code)


@pytest.fixture
def inline(admin: Client, topic: str) -> str:
    """A topic with a secret that is inline, of which the subscription "fails" has made a dead letter."""
    admin.create_topic(topic, partitions=1, inline=100)
    admin.create_subscription(topic, "s")
    admin.create_subscription(topic, "fails", max_retries=0)
    admin.publish(topic, SECRET, key="k", attributes={"region": "eu"})
    with admin.subscribe(topic, "fails") as consumer:
        consumer.receive(timeout=SOON).nack(delay=0)
    wait_until(lambda: list(admin.dead_letters(topic)))
    admin.create_subscription(f"{topic}.dead", "s", start="earliest")
    return topic


def test_who_may_not_consume_learns_of_a_body_that_is_inline_only_its_size(
    guarded: RunningBroker, admin: Client, inline: str
) -> None:
    dead = f"{inline}.dead"
    for grants in ([f"observe:{inline}*"], [f"produce:{inline}*"], [f"observe:{inline}*", "consume:x"]):
        token = admin.create_token("watcher", grants).token
        with Client(guarded.url, token=token) as client, http(guarded, token) as web:
            for topic in (inline, dead):
                [peeked] = client.peek(topic, "s")
                assert (peeked.key, peeked.size, peeked.data) == ("k", len(SECRET), None)
                assert peeked.attributes["region"] == "eu"
                with pytest.raises(Forbidden, match=f"consume:{topic}"):
                    client.peek(topic, "s", bodies=True)
            with pytest.raises(Forbidden, match=f"consume:{dead}"):
                list(client.dead_letters(inline))
            [letter] = web.get(f"/v1/topics/{inline}/dead-letters").json()
            assert (letter["key"], letter["size"]) == ("k", len(SECRET))
            for ask in (client.bodies, client.has_bodies):
                with pytest.raises(Forbidden, match=f"consume:{dead}"):
                    ask(dead, [letter["body"]])


def test_a_body_that_is_inline_is_shown_to_who_may_consume_where_it_is_stored(
    guarded: RunningBroker, admin: Client, inline: str
) -> None:
    dead = f"{inline}.dead"
    token = admin.create_token("reader", [f"observe:{inline}", f"consume:{dead}"]).token
    with Client(guarded.url, token=token) as client, http(guarded, token) as web:
        assert [one.data for one in client.peek(dead, "s", bodies=True)] == [SECRET]
        [letter] = web.get(f"/v1/topics/{inline}/dead-letters").json()
        assert client.bodies(dead, [letter["body"]]) == [SECRET]
        with pytest.raises(Forbidden, match=f"consume:{inline}"):
            client.peek(inline, "s", bodies=True)


async def test_nothing_that_takes_the_right_to_observe_shows_a_body_that_is_inline(
    guarded: RunningBroker, admin: Client, inline: str
) -> None:
    token = (await asyncio.to_thread(admin.create_token, "watcher", ["observe:*"])).token
    [message] = await asyncio.to_thread(admin.peek, inline, "s")
    of_topic = {"topic": inline, "subscription": "s", "name": "s", "message": message.id, "token": token}
    async with connect(guarded.urls[0], token) as peer:
        for type, (kind, _) in HANDLERS.items():
            if NEEDS.get(wire.Type(type).name.lower()) == "observe":
                said = {name: of_topic[name] for name in kind.__struct_fields__ if name in of_topic}
                frame = await peer.answer(kind(**said))
                shown = bytes(frame.properties) + bytes(frame.body)
                assert not any(text in shown for text in SHOWN), kind.__name__
    with http(guarded, token) as web:
        for one in OPERATIONS:
            if one.action == "observe":
                path = one.path.format(topic=inline, subscription="s")
                answer = web.get(path, params={"id": message.id} if one.name == "explain" else {})
                assert answer.status_code == 200, (one.name, answer.text)
                assert not any(text in answer.content for text in SHOWN), one.name


async def test_a_body_that_is_longer_than_its_producer_says_is_not_read_as_a_whole(
    guarded: RunningBroker, admin: Client, own: str
) -> None:
    names = ksuid.take(3, 0.0)
    bodies = [b"x" * 10, b"x" * 100_000, b"x" * 3_000_000]  # the last one in parts
    with http(guarded, ADMIN) as web:
        for name, body in zip(names, bodies, strict=True):
            assert web.put(f"/v1/bodies/{own}/{name}", content=body).status_code == 200
        async with connect(guarded.urls[0], ADMIN) as peer:
            flat = [text for name in names for text in ("", f"uid-{name}", f"1  10:{name} ")]
            flat += ["", "who tells the truth", f"1  100000:{names[1]} "]  # which helps no other
            await peer.answer(wire.Publish(own, 0), wire.pack(flat))
        place = f"/v1/topics/{own}/subscriptions/s"
        peeked = web.get(f"{place}/peek", params={"bodies": True}).json()
        leased = web.post(f"{place}/lease", json={"wait": 30}).json()["messages"]
        for found in (peeked, leased):
            assert [message.get("data") for message in found] == ["x" * 10, None, None, "x" * 100_000]
            for message, body in zip(found[1:3], bodies[1:], strict=True):
                assert web.get(message["body"]).content == body


def test_bodies_that_never_end_leave_room_for_those_of_others(
    guarded: RunningBroker, admin: Client, own: str, other: str
) -> None:
    token = admin.create_token("trickler", [f"produce:{own}"]).token
    port = guarded.workers[0].settings.http_port
    with contextlib.ExitStack() as stack:
        for name in ksuid.take(100, 0.0):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            head = f"PUT /v1/bodies/{own}/{name} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}"
            slow.sendall(head.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        admin.publish(other, b"a body")
        with admin.subscribe(other, "s") as consumer:
            assert consumer.receive(timeout=SOON).data() == b"a body"


# Where nobody needs a token


@pytest.fixture(scope="module")
def open_broker() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, heartbeat=0.3, max_connections=20) as broker:
        yield broker


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
        {"Host": "rebound.example.com:8080"},
        {
            "Host": "rebound.example.com",
            "Origin": "http://rebound.example.com",
            "Sec-Fetch-Site": "same-origin",
        },
    ],
)
def test_a_page_of_another_site_cannot_use_the_browser_of_who_visits_it(
    open_broker: RunningBroker, headers: dict[str, str], topic: str
) -> None:
    with httpx.Client(base_url=open_broker.http_urls[0], timeout=SOON) as web:
        # What a browser sends without asking first.
        said = {"Content-Type": "text/plain", **headers}
        answer = web.post("/v1/topics", content=f'{{"name": "{topic}"}}', headers=said)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert web.get("/v1/topics", headers=headers).status_code == 403
        assert topic not in web.get("/v1/topics").json()["topics"]


def test_programs_and_its_own_pages_are_let_in(open_broker: RunningBroker) -> None:
    url = open_broker.http_urls[0]
    port = url.rpartition(":")[2]
    for headers in (
        {},
        {"Host": f"localhost:{port}"},
        {"Host": f"[::1]:{port}"},
        {"Host": f"keylane.localhost:{port}"},
        {"Origin": url},
        {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"},
        {"Origin": "https://proxy.example.com", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert httpx.get(f"{url}/v1/info", headers=headers).status_code == 200, headers


@pytest.mark.slow
def test_who_sends_a_byte_now_and_then_holds_no_place(open_broker: RunningBroker) -> None:
    url, place = open_broker.http_urls[0], open_broker.workers[0].settings
    refused = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
    slow = [socket.create_connection(("127.0.0.1", place.http_port)) for _ in range(place.max_connections)]
    try:
        wait_until(lambda: httpx.get(f"{url}/healthz").status_code == 429)  # there is room for none
        for number, one in enumerate(slow):
            with contextlib.suppress(OSError):
                one.sendall((b"GET / HTTP/1.1\r\nX: ", refused, b"")[number % 3])
        ended = threading.Event()

        def trickle() -> None:
            while not ended.wait(0.1):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            wait_until(lambda: httpx.get(f"{url}/healthz").status_code == 200)
        finally:
            ended.set()
            thread.join()
    finally:
        for one in slow:
            one.close()


def test_who_is_told_that_the_body_does_not_come_is_hung_up_on(
    open_broker: RunningBroker, topic: str
) -> None:
    port = open_broker.workers[0].settings.http_port
    head = f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as slow:
        slow.sendall(head.encode())
        answer = b""
        while some := slow.recv(65_536):
            answer += some
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"of the body came within" in answer


def test_a_request_that_says_twice_how_long_it_is_is_refused_with_what_follows(
    open_broker: RunningBroker, topic: str
) -> None:
    made = f'{{"name": "{topic}"}}'.encode()
    hidden = b"POST /v1/topics HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
        len(made),
        made,
    )
    outer = b"POST /v1/cluster/rebalance HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    request = outer + b"Content-Length: %d\r\n\r\n0\r\n\r\n%b" % (len(hidden) + 5, hidden)
    with socket.create_connection(("127.0.0.1", open_broker.workers[0].settings.http_port)) as connection:
        connection.settimeout(SOON)
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert topic not in httpx.get(f"{open_broker.http_urls[0]}/v1/topics").json()["topics"]


def test_who_is_not_known_yet_gets_no_memory_for_a_large_frame(guarded: RunningBroker) -> None:
    with socket.create_connection(("127.0.0.1", guarded.settings.port)) as connection:
        connection.settimeout(SOON)
        connection.sendall((1024 * 1024).to_bytes(4, "big") + bytes(100_000))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                answer += part
    [frame] = wire.FrameReader().feed(answer)
    assert wire.properties_of(frame, wire.Error).code == "protocol_error"


@pytest.mark.parametrize("type", [wire.Type.OK, wire.Type.HEARTBEAT, wire.Type.PUBLISH])
def test_who_does_not_greet_first_is_hung_up_on(guarded: RunningBroker, type: wire.Type) -> None:
    with socket.create_connection(("127.0.0.1", guarded.settings.port)) as connection:
        connection.settimeout(5)
        connection.sendall(wire.frame(wire.Properties(), 1, type=type))
        [frame] = wire.FrameReader().feed(connection.recv(65_536))
        assert wire.properties_of(frame, wire.Error).code == "protocol_error"
        assert connection.recv(65_536) == b""


@pytest.mark.slow
async def test_bodies_are_deleted_by_those_who_may_use_their_topic(tmp_path: Path, topic: str) -> None:
    with RunningBroker(auth=True, admin_token=ADMIN, payloads=f"file://{tmp_path}") as broker:
        with Client(broker.url, token=ADMIN) as admin:
            stranger = admin.create_token("stranger", ["observe:*"]).token
            user = admin.create_token("user", [f"consume:{topic}"]).token
            admin.create_topic(topic, partitions=1)
            admin.create_subscription(topic, "s")
            await asyncio.to_thread(admin.publish_many, topic, [OutgoingMessage(b"a body")] * 10)
        async with (
            connect(broker.urls[0], stranger) as curious,
            connect(broker.urls[0], user) as deleting,
            connect(broker.urls[0], user) as consuming,
        ):
            await curious.ask(wire.Info(token=stranger, store="advertised"), wire.InfoReply)
            await deleting.ask(wire.Info(token=user, store="advertised"), wire.InfoReply)
            stream = Stream(consuming, topic, "s", "c")
            await stream.open()
            for item in await stream.receive(10):
                await stream.ack(item)
            for _ in range(10):
                await deleting.push(wire.DeleteBodies)
            await curious.echo()
            assert not curious.has(wire.DeleteBodies)
