"""The client and its connection: greeting, heartbeats, losing it and coming back."""

import asyncio
import re
import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from keylane import AsyncClient, Client, wire
from keylane.connect.seeds import Seed, parse_seeds, server_or_default, token_or_default
from keylane.errors import (
    ConnectionClosed,
    ConnectionFailed,
    IncompatibleVersion,
    InvalidArgument,
    Overloaded,
    TopicExists,
    Unauthorized,
)
from tests.support.scripted_worker import PATIENCE, ScriptedWorker


def test_seeds_are_a_url_a_list_or_one_url_with_several_hosts() -> None:
    assert parse_seeds("keylane://a") == [Seed("a", 9999, False)]
    assert parse_seeds("keylanes://a:1,b:2/") == [Seed("a", 1, True), Seed("b", 2, True)]
    assert parse_seeds(["keylane://a", "keylane://[::1]:7"]) == [
        Seed("a", 9999, False),
        Seed("::1", 7, False),
    ]


@pytest.mark.parametrize("seed", ["localhost:9999", "http://a", "keylane://", "keylane://a:many", []])
def test_a_seed_that_cannot_be_one_is_named(seed: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(repr(seed)) if seed else "no broker is named"):
        AsyncClient(seed)


@pytest.mark.parametrize(
    ("seed", "complaint"),
    [
        ("keylane://host:9999/orders", "'/orders' is not allowed here; use keylane://host:port"),
        ("keylane://a:1,b:2/orders", "'/orders' is not allowed here"),
        ("keylane://host?tls=yes", "'\\?tls=yes' is not allowed here"),
        ("keylane://user:secret@host:9999", "give a token, with token=… or KEYLANE_TOKEN"),
        ("keylane://user:sec/ret@host:9999/orders", "give a token"),
    ],
)
def test_what_a_seed_has_beside_host_and_port_is_refused_and_not_ignored(seed: str, complaint: str) -> None:
    """And a password is not shown."""
    with pytest.raises(InvalidArgument, match=complaint) as caught:
        AsyncClient(seed)
    assert "sec" not in str(caught.value)


@pytest.mark.slow
async def test_no_broker_says_where_it_looked_and_how_to_start_one(unused_port: int) -> None:
    with pytest.raises(ConnectionFailed) as caught:
        async with AsyncClient(f"keylane://127.0.0.1:{unused_port}"):
            pass
    assert str(caught.value) == (
        f"no broker at keylane://127.0.0.1:{unused_port} (connection refused); start one with `keylane serve`"
    )


@pytest.mark.slow
async def test_tls_where_there_is_none_and_the_other_way_round_is_named() -> None:
    """By what to write instead."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x00\x00\x00\x05hello")  # no TLS
        with suppress(ConnectionError):
            await reader.read()  # until the other side goes: it has seen the answer
        writer.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()  # as who wants TLS does

    for serve, scheme, advice in (
        (answer, "keylanes", "it does not speak TLS, so use keylane://"),
        (hang_up, "keylane", "for a TLS port use keylanes://"),
    ):
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConnectionFailed, match=advice):
                async with AsyncClient(f"{scheme}://127.0.0.1:{port}"):
                    pass


@pytest.mark.slow
async def test_a_host_that_nobody_knows_is_an_error_and_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    said = r"no broker at keylane://no-such\.invalid:9999 \(.*known.*\); check the name of the host"
    with pytest.raises(ConnectionFailed, match=said):
        async with AsyncClient("keylane://no-such.invalid", timeout=0.1):
            pass
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_first_seed_that_answers_is_used(unused_port: int) -> None:
    async with ScriptedWorker() as worker:
        seeds = [f"keylane://127.0.0.1:{unused_port}", worker.url]
        async with AsyncClient(seeds) as client:
            assert (await client.info()).worker == "scripted"


async def test_server_and_token_are_those_of_the_environment_unless_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedWorker() as named, ScriptedWorker() as other:
        monkeypatch.setenv("KEYLANE_SERVER", named.url)
        monkeypatch.setenv("KEYLANE_TOKEN", "of the environment")
        async with AsyncClient():
            assert (await named.expect(wire.Info)).properties.token == "of the environment"
        async with AsyncClient(other.url, token="given"):
            assert (await other.expect(wire.Info)).properties.token == "given"

        def without_a_loop() -> None:
            with Client():
                pass

        await asyncio.to_thread(without_a_loop)
        assert (await named.expect(wire.Info)).properties.token == "of the environment"


async def test_variables_that_are_empty_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYLANE_SERVER", "")
    monkeypatch.setenv("KEYLANE_TOKEN", "")
    assert server_or_default(None) == "keylane://127.0.0.1:9999"
    assert token_or_default(None) is None


async def test_a_wrong_token_is_not_tried_again() -> None:
    async with ScriptedWorker() as worker:
        worker.refusal = wire.Error("unauthorized", "no such token")
        with pytest.raises(Unauthorized, match="no such token"):
            async with AsyncClient(worker.url, token="wrong"):
                pass
        assert len(worker.links) == 1


async def test_a_worker_of_another_version_is_refused() -> None:
    async with ScriptedWorker(version=9) as worker:
        with pytest.raises(IncompatibleVersion, match="version 9"):
            async with AsyncClient(worker.url):
                pass


@pytest.mark.slow
async def test_a_worker_that_is_full_for_a_moment_is_tried_again() -> None:
    async with ScriptedWorker() as worker:
        worker.refusal = wire.Error("overloaded", "too many connections")
        asyncio.get_running_loop().call_later(0.1, setattr, worker, "refusal", None)
        async with AsyncClient(worker.url):
            pass
        worker.refusal = wire.Error("overloaded", "too many connections")
        with pytest.raises(Overloaded):
            async with AsyncClient(worker.url):
                pass


async def test_a_heartbeat_of_the_worker_is_answered() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url):
        worker.link.send(wire.Heartbeat(), sequence=77)
        answer = await worker.expect(wire.Properties)
        assert answer.frame.sequence == 77


@pytest.mark.slow
async def test_a_worker_that_falls_silent_is_left_for_a_new_connection() -> None:
    async with ScriptedWorker(heartbeat_ms=300) as worker, AsyncClient(worker.url) as client:
        first = worker.link
        worker.silent = True
        await asyncio.wait_for(first.closed, PATIENCE)
        worker.silent = False
        asked = asyncio.create_task(client.topics())
        (await worker.expect(wire.Topics)).ok(body=["b", "a"])
        assert await asked == ["a", "b"]
        assert worker.link is not first


async def test_garbage_from_the_worker_ends_the_connection_not_the_client() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        asked = asyncio.create_task(client.topics())
        await worker.expect(wire.Topics)
        worker.link.transport.write(b"\xff" * 100)
        (await worker.expect(wire.Topics)).ok(body=[])
        assert await asked == []
        assert len(worker.links) == 2


async def test_a_question_whose_answer_was_lost_is_asked_again() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        asked = asyncio.create_task(client.describe_topic("orders"))
        await worker.expect(wire.DescribeTopic)
        worker.link.drop()
        (await worker.expect(wire.DescribeTopic)).error("unavailable")
        (await worker.expect(wire.DescribeTopic)).ok(wire.TopicReply(4, 1000))
        assert (await asked).partitions == 4


async def test_what_must_not_be_done_twice_is_not_repeated() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        asked = asyncio.create_task(client.create_topic("orders"))
        await worker.expect(wire.CreateTopic)
        worker.link.drop()
        with pytest.raises(ConnectionClosed):
            await asked
        asked = asyncio.create_task(client.create_topic("orders"))
        (await worker.expect(wire.CreateTopic)).error("topic_exists", "there is a topic 'orders'")
        with pytest.raises(TopicExists, match="there is a topic 'orders'"):
            await asked


@pytest.mark.slow
async def test_while_the_broker_is_away_requests_wait_as_long_as_the_timeout() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url, timeout=2.0) as client:
        await worker.expect(wire.Info)
        await worker.stop()
        with pytest.raises((ConnectionFailed, ConnectionClosed)):
            await client.topics()
        await worker.listen()
        await worker.expect(wire.Info)
        asked = asyncio.create_task(client.topics())
        (await worker.expect(wire.Topics)).ok(body=[])
        assert await asked == []


async def test_a_clock_that_is_off_is_reported_once() -> None:
    drifts: list[float] = []
    async with ScriptedWorker(heartbeat_ms=300) as worker:
        worker.drift_ms = 5_000
        async with AsyncClient(worker.url, on_time_drift=drifts.append) as client:
            assert [round(drift) for drift in drifts] == [5]
            for _ in range(3):
                await client.info()
            assert len(drifts) == 1
            worker.drift_ms = -9_000
            await client.info()
            assert [round(drift) for drift in drifts] == [5, -9]


async def test_a_clock_that_is_right_is_not_worth_a_word() -> None:
    drifts: list[float] = []
    async with ScriptedWorker() as worker, AsyncClient(worker.url, on_time_drift=drifts.append) as client:
        await client.info()
    assert drifts == []


async def test_what_is_not_open_says_how_to_open_it() -> None:
    client = AsyncClient()
    with pytest.raises(InvalidArgument, match="use it with `async with`"):
        await client.topics()
    with pytest.raises(InvalidArgument, match="use it with `async with`"):
        await client.subscribe("orders", "billing").receive()
    with pytest.raises(InvalidArgument, match="use it with `with`"):
        Client().topics()
    await client.close()


async def test_those_who_wait_when_the_client_closes_are_told() -> None:
    async with ScriptedWorker() as worker:
        async with AsyncClient(worker.url) as client:
            asked = asyncio.create_task(client.topics())
            await worker.expect(wire.Topics)
        with pytest.raises(ConnectionClosed, match="closed"):
            await asked
        with pytest.raises(ConnectionClosed, match="closed"):
            await client.topics()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl, which is not here")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    command = [*make.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.mark.slow
async def test_keylanes_is_tls_with_a_certificate_that_is_checked(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ScriptedWorker()
    worker.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    worker.tls.load_cert_chain(*certificate)
    async with worker:
        with pytest.raises(ConnectionFailed, match="certificate"):
            async with AsyncClient(worker.url):
                pass
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        async with AsyncClient(worker.url) as client:
            assert (await client.info()).worker == "scripted"


async def test_a_drift_callback_that_raises_does_not_cost_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def complain(drift: float) -> None:
        raise RuntimeError("what time is it?")

    async with ScriptedWorker() as worker:
        worker.drift_ms = 5_000
        async with AsyncClient(worker.url, on_time_drift=complain) as client:
            worker.drift_ms = 9_000
            worker.link.drop()
            await asyncio.wait_for(client.info(), PATIENCE)
    assert "on_time_drift failed" in caplog.text


async def test_a_client_that_was_closed_is_not_opened_again() -> None:
    async with ScriptedWorker() as worker:
        client = AsyncClient(worker.url)
        async with client:
            with pytest.raises(InvalidArgument, match="create another"):
                await client.__aenter__()
        with pytest.raises(InvalidArgument, match="create another"):
            await client.__aenter__()
