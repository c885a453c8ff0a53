"""Events: hints on a channel, said to all who listen; some may get lost."""

import asyncio
import logging
from collections.abc import Callable
from random import random
from secrets import token_hex

from redis.exceptions import ConnectionError, RedisClusterException, RedisError

from keylane.errors import Unavailable
from keylane.redis.errors import LOST
from keylane_broker.store.servers import Servers

_ECHO = 3.0  # seconds between two proofs that a channel is heard, and for each of them
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0  # seconds before a channel is listened to again

log = logging.getLogger("keylane.broker")


async def say(servers: Servers, channel: str, text: str, but: str = "") -> None:
    """Publish on a channel, by any server, but not by the one of this name if there are others."""
    if servers.shared:
        await servers.send(await servers.any_server(but), "PUBLISH", channel, text)
    else:
        await servers.by_redis_py("PUBLISH", channel, text)


async def listen(servers: Servers, channel: str, on_message: Callable[[str], None]) -> None:
    """Pass on what is published on a channel until cancelled; "" whenever some may have been missed.

    A connection can go deaf without ending: its server hangs, or is no longer part of the whole. So
    the listener says something on a channel of its own now and then, and expects to hear it.
    """
    echo = f"{channel}:{token_hex(8)}"
    pause, refused = _FIRST_PAUSE, ""

    def hear(text: str) -> None:
        nonlocal pause, refused
        pause, refused = _FIRST_PAUSE, ""
        if text != echo:
            on_message(text)

    while True:
        try:
            await _listen(servers, channel, echo, hear)
        except (*LOST, OSError, RedisClusterException, Unavailable):
            pass  # those who want more than to listen say so
        except RedisError as error:
            if str(error) != refused:
                log.warning("Redis does not let the broker listen to %s: %s", channel, error)
            refused = str(error)
        await asyncio.sleep(pause * (0.5 + random() / 2))
        pause = min(2 * pause, _LAST_PAUSE)


async def _listen(servers: Servers, channel: str, echo: str, hear: Callable[[str], None]) -> None:
    """Listen over one connection, for as long as the echo comes back."""
    server = await servers.any_server()
    # Anybody can say anything there.
    options = {**server.source.connection_kwargs, "encoding_errors": "replace"}
    connection = server.source.connection_class(**options)
    try:
        await connection.connect()
        await connection.send_command("SUBSCRIBE", echo, channel)
        clock = asyncio.get_running_loop().time
        called, at = False, clock() + _ECHO
        while True:
            match await connection.read_response(timeout=max(at - clock(), 0.001)):
                case ["subscribe", name, _] if name == channel:
                    hear("")
                case ["message", name, text] if name == channel:
                    hear(text)
                case ["message", _, _]:
                    hear(echo)
                    called, at = False, clock() + _ECHO
            if clock() >= at:
                if called:
                    raise ConnectionError("this server does not hear what is said to the others")
                await say(servers, echo, "", server.name)
                called, at = True, clock() + _ECHO
    except LOST:
        servers.lost.add(server.name)
        raise
    finally:
        await connection.disconnect(nowait=True)
