"""What comes by HTTP is read in turns where that takes long: nobody keeps the worker from all others."""

import asyncio
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from keylane_broker.http.impatient_protocol import protocol_of

CHUNKS = b"1\r\nx\r\n" * 20_000


@pytest.fixture
async def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What h11 was given, in its order."""
    found: list[bytes] = []
    monkeypatch.setattr(H11Protocol, "data_received", lambda _, data: found.append(data))
    return found


def connected() -> tuple[H11Protocol, Mock]:
    config = uvicorn.Config(Mock(), lifespan="off", log_config=None)
    config.load()
    protocol = protocol_of(patience=60.0, most=10)(config, ServerState(), {})
    transport = Mock()
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    protocol.connection_made(transport)
    return protocol, transport


async def test_chunks_of_a_byte_are_read_a_little_at_a_time(read: list[bytes]) -> None:
    protocol, transport = connected()
    protocol.data_received(CHUNKS)
    assert 0 < len(b"".join(read)) < len(CHUNKS) / 4
    assert transport.pause_reading.called
    protocol.data_received(b"0\r\n\r\n")  # it was on its way
    read_on = asyncio.Event()
    transport.resume_reading.side_effect = read_on.set
    await read_on.wait()
    assert b"".join(read) == CHUNKS + b"0\r\n\r\n"
    protocol.connection_lost(None)


async def test_nothing_more_comes_before_what_there_is_has_been_read(read: list[bytes]) -> None:
    """Whoever reads the body asks for more as soon as it has what h11 was given."""
    protocol, transport = connected()
    transport.pause_reading.side_effect = lambda: setattr(transport, "listens", False)
    transport.resume_reading.side_effect = lambda: setattr(transport, "listens", True)
    protocol.data_received(CHUNKS)
    while len(b"".join(read)) < len(CHUNKS):
        protocol.flow.pause_reading()
        protocol.flow.resume_reading()
        assert not transport.listens
        await asyncio.sleep(0)
    assert transport.listens
    protocol.flow.pause_reading()
    assert not transport.listens
    protocol.connection_lost(None)


async def test_what_is_left_of_a_connection_that_has_ended_is_not_read(read: list[bytes]) -> None:
    protocol, transport = connected()
    protocol.data_received(CHUNKS)
    some = len(read)
    transport.is_closing.return_value = True
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(read) == some
    protocol.connection_lost(None)


async def test_a_body_without_lines_is_read_at_once(read: list[bytes]) -> None:
    protocol, transport = connected()
    protocol.data_received(bytes(1_000_000))
    assert read == [bytes(1_000_000)]
    assert not transport.pause_reading.called
    protocol.connection_lost(None)
