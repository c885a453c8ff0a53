"""TLS on every port: who is let in, and what is said to those who are not."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trustme

from keylane import AsyncClient, Client, ConnectionFailed
from keylane_broker.config import ConfigError, Settings, load
from keylane_broker.errors import ServerError
from keylane_broker.supervise.embedded_server import Server
from keylane_broker.tls import own_context, server_context
from tests.support.commands import keylane
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # every broker is made anew, with certificates

SOON = 60.0
HANGS = 30.0  # seconds: far less than asyncio has patience, far more than the worker is to have


class Authority:
    """An authority, and the files of a broker's certificate by it."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.cert, self.key, self.root = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
        own = self.ca.issue_cert("127.0.0.1", "localhost")
        own.private_key_pem.write_to_path(str(self.key))
        for blob in own.cert_chain_pems:
            blob.write_to_path(str(self.cert), append=True)
        self.ca.cert_pem.write_to_path(str(self.root))

    def context(self, *, certified: bool = False) -> ssl.SSLContext:
        """What a client that trusts it connects with; `certified` has a certificate by it."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if certified:
            self.ca.issue_cert("app@example.com").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[RunningBroker]:
    with RunningBroker(workers=2, http=True, tls_cert=authority.cert, tls_key=authority.key) as broker:
        yield broker


def url(broker: RunningBroker) -> str:
    return broker.url.replace("keylane://", "keylanes://")


def test_everything_works_over_tls_also_with_several_workers(
    broker: RunningBroker, authority: Authority, topic: str
) -> None:
    with Client(url(broker), tls=authority.context()) as client:
        client.create_topic(topic, partitions=4)
        with client.subscribe(topic, "s") as consumer:
            for number in range(8):
                client.publish(topic, str(number), key=f"k{number}")
            got = set()
            for _ in range(8):
                message = consumer.receive(timeout=SOON)
                got.add(message.data())
                message.ack()
            assert got == {str(number).encode() for number in range(8)}


def test_workers_hand_on_to_each_other_over_tls(
    broker: RunningBroker, authority: Authority, topic: str
) -> None:
    path = f"/v1/topics/{topic}"
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                httpx.Client(
                    base_url=url.replace("http:", "https:"), verify=authority.context(), timeout=SOON
                )
            )
            for url in broker.http_urls
        ]
        assert workers[0].post("/v1/topics", json={"name": topic}).status_code == 201
        assert workers[0].post(f"{path}/subscriptions", json={"name": "s"}).status_code == 201
        for http, other in (workers, reversed(workers)):
            said = {"messages": [{"data": "1"}]}
            assert other.post(f"{path}/messages", json=said).status_code == 200
            answer = http.post(f"{path}/subscriptions/s/lease", json={"wait": SOON, "consumer": "c"})
            [message] = answer.json()["messages"]
            settled = {"receipts": [message["receipt"]]}
            assert other.post(f"{path}/subscriptions/s/ack", json=settled).json() == {"results": ["settled"]}


def test_http_speaks_tls_too(broker: RunningBroker, authority: Authority, topic: str) -> None:
    with httpx.Client(
        base_url=broker.http_urls[1].replace("http:", "https:"), verify=authority.context(), timeout=SOON
    ) as http:
        assert http.post("/v1/topics", json={"name": topic}).status_code == 201
        assert http.get("/readyz").status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(broker.http_urls[1] + "/healthz", timeout=SOON)


@pytest.mark.slow
def test_bodies_go_by_https_where_workers_store_them(authority: Authority, topic: str) -> None:
    with (
        RunningBroker(
            http=True,
            http_port=1,
            payloads="keylane+https://",
            tls_cert=authority.cert,
            tls_key=authority.key,
        ) as broker,
        Client(url(broker), tls=authority.context()) as client,
    ):
        assert client.info().payloads == "keylane+https://"
        client.create_topic(topic, partitions=1)
        with client.subscribe(topic, "s") as consumer:
            for body in (b"1", b"2" * 5_000_000):
                client.publish(topic, body, key="k")
                message = consumer.receive(timeout=SOON)
                assert message.data() == body
                message.ack()


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, authority: Authority) -> AsyncIterator[int]:
    """A port that speaks TLS on behalf of another, since the server of the wheel cannot."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.cert, authority.key)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, theirs[1]), pipe(theirs[0], writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@pytest.mark.slow
async def test_redis_is_reached_over_tls(authority: Authority, topic: str) -> None:
    """By workers, which listen and run scripts there, and by clients, which store bodies."""
    with Server() as server:
        async with tls_in_front_of(server.port, authority) as port:
            url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.root}"
            broker = RunningBroker(url, workers=2)
            await asyncio.to_thread(broker.__enter__)
            try:
                async with AsyncClient(broker.url) as client:
                    assert (await client.info()).payloads == url.partition("?")[0]  # as it is shown
                    await client.create_topic(topic, partitions=4)
                    async with client.subscribe(topic, "s") as consumer:
                        for body in (b"1", b"2" * 3_000_000):
                            await client.publish(topic, body)
                            message = await consumer.receive(timeout=SOON)
                            assert await message.data() == body
                            await message.ack()
            finally:
                await asyncio.to_thread(broker.close)
            stranger = f"rediss://127.0.0.1:{port}/0"
            done = await asyncio.to_thread(keylane, "serve", "--redis", stranger, "--port", "0", status=1)
            assert "certificate verify failed" in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_garbage_instead_of_a_handshake_harms_nobody(
    broker: RunningBroker, authority: Authority, topic: str
) -> None:
    ports = [int(where.rpartition(":")[2]) for where in (*broker.urls, *broker.http_urls)]
    for port in ports:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(500), bytes(range(256))):
            with socket.create_connection(("127.0.0.1", port), timeout=SOON) as own:
                own.sendall(garbage)
                own.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while own.recv(65_536):
                        pass
    test_everything_works_over_tls_also_with_several_workers(broker, authority, topic)


@pytest.mark.slow
def test_a_handshake_that_does_not_get_on_is_cut_off_on_every_port(authority: Authority) -> None:
    """As are the first lines of a request; asyncio alone would wait for a minute."""
    with (
        RunningBroker(http=True, heartbeat=0.3, tls_cert=authority.cert, tls_key=authority.key) as broker,
        contextlib.ExitStack() as stack,
    ):
        for where in (*broker.urls, *broker.http_urls):
            for beginning in (b"", b"\x16\x03\x01\x02\x00\x01"):
                own = socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])), timeout=HANGS)
                stack.enter_context(own).sendall(beginning)
                with suppress(ConnectionError):
                    assert own.recv(65_536) == b""  # a TimeoutError is none of those
        with Client(url(broker), tls=authority.context()) as client:
            assert client.info().version
        where = broker.http_urls[0].replace("http:", "https:")
        assert httpx.get(f"{where}/readyz", verify=authority.context(), timeout=SOON).status_code == 200


@pytest.mark.slow
def test_who_does_not_trust_the_certificate_is_told_so(broker: RunningBroker) -> None:
    with pytest.raises(ConnectionFailed, match="SSL_CERT_FILE"):
        Client(url(broker), timeout=2.0).__enter__()


@pytest.mark.slow
def test_who_comes_without_tls_is_told_what_to_use(broker: RunningBroker) -> None:
    with pytest.raises(ConnectionFailed, match="keylanes://"):
        Client(broker.url, timeout=2.0).__enter__()


@pytest.mark.slow
def test_where_clients_need_a_certificate_only_those_with_one_are_let_in(
    authority: Authority, topic: str
) -> None:
    with RunningBroker(
        http=True, tls_cert=authority.cert, tls_key=authority.key, tls_client_ca=authority.root
    ) as broker:
        with Client(url(broker), tls=authority.context(certified=True)) as client:
            client.create_topic(topic)
        with pytest.raises(ConnectionFailed):
            Client(url(broker), tls=authority.context(), timeout=2.0).__enter__()
        where = broker.http_urls[0].replace("http:", "https:") + f"/v1/topics/{topic}"
        assert httpx.get(where, verify=authority.context(certified=True), timeout=SOON).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(where, verify=authority.context(), timeout=SOON)


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for path in (empty, tmp_path / "nothing.pem"):
        with pytest.raises(ServerError, match=f"tls_cert {path}"):
            server_context(Settings(tls_cert=path))
    with pytest.raises(ConfigError, match="tls_cert"):
        load(tls_key=empty)


def test_a_worker_talks_only_to_workers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, known = Authority(tmp_path), trustme.CA()  # by which anybody can get a certificate
    known.cert_pem.write_to_path(str(tmp_path / "known.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "known.pem"))
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(authority.cert, authority.key)
    client = own_context(Settings(tls_cert=authority.cert, tls_key=authority.key))
    assert client is not None
    shake_hands(client, own, "10.0.0.1")
    shake_hands(client, certified(known, "broker-2.example.com"), "broker-2.example.com")
    shake_hands(client, certified(known, "10.0.0.2"), "10.0.0.2")
    shake_hands(client, certified(known, "*.example.com"), "broker-3.example.com")
    for stranger in (
        certified(known, "stranger.example.com"),
        certified(known, "*.com"),
        certified(trustme.CA(), "broker-2.example.com"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(client, stranger, "broker-2.example.com")


def certified(ca: trustme.CA, name: str) -> ssl.SSLContext:
    """What a server with a certificate for that name has."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert(name).configure_cert(context)
    return context


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (one, other, one, other):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert one.version()
