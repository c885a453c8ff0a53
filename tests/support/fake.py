"""An engine on fakeredis: no server at all, for tests of our own and of users' applications.

fakeredis runs every script as it is but for cmsgpack, which it lacks; a few lines of Lua stand in. It has
no WAIT, WAITAOF or INFO, so durability beyond "memory" cannot be asked of it, and no memory limit.
"""

from functools import cache
from typing import Any, cast

from fakeredis import FakeAsyncRedis, FakeServer

from keylane.errors import BrokerError
from keylane_broker.engine.engine import Engine
from keylane_broker.store.connection import OnAnswer, SharedConnection
from keylane_broker.store.scripts import Scripts, read_sources
from keylane_broker.store.store import Call, Store
from keylane_broker.worker import eager
from tests.support.clock import ManualTime, with_test_clock

# MessagePack as msgspec writes it: strings, integers, floats, booleans, nil and arrays.
CMSGPACK = r"""
local cmsgpack = {}

function cmsgpack.unpack(text)
  local at = 1

  local function unsigned(size)
    local number = 0
    for index = at, at + size - 1 do
      number = number * 256 + string.byte(text, index)
    end
    at = at + size
    return number
  end

  local function signed(size)
    local number = unsigned(size)
    return number >= 2 ^ (8 * size - 1) and number - 2 ^ (8 * size) or number
  end

  local function bytes(size)
    at = at + size
    return string.sub(text, at - size, at - 1)
  end

  local function float64()
    local head, low = unsigned(4), unsigned(4)
    local exponent = math.floor(head / 2 ^ 20) % 2048
    local fraction = (head % 2 ^ 20 * 2 ^ 32 + low) / 2 ^ 52
    local sign = head >= 2 ^ 31 and -1 or 1
    return sign * (exponent == 0 and fraction * 2 ^ -1022 or (1 + fraction) * 2 ^ (exponent - 1023))
  end

  local value

  local function array(size)
    local items = {}
    for index = 1, size do
      items[index] = value()
    end
    return items
  end

  local readers = {
    [0xc0] = function() return nil end,
    [0xc2] = function() return false end,
    [0xc3] = function() return true end,
    [0xcb] = float64,
    [0xcc] = function() return unsigned(1) end,
    [0xcd] = function() return unsigned(2) end,
    [0xce] = function() return unsigned(4) end,
    [0xcf] = function() return unsigned(8) end,
    [0xd0] = function() return signed(1) end,
    [0xd1] = function() return signed(2) end,
    [0xd2] = function() return signed(4) end,
    [0xd3] = function() return signed(8) end,
    [0xd9] = function() return bytes(unsigned(1)) end,
    [0xda] = function() return bytes(unsigned(2)) end,
    [0xdb] = function() return bytes(unsigned(4)) end,
    [0xdc] = function() return array(unsigned(2)) end,
    [0xdd] = function() return array(unsigned(4)) end,
  }

  function value()
    local kind = unsigned(1)
    if kind < 0x80 then
      return kind
    elseif kind >= 0xe0 then
      return kind - 0x100
    elseif kind >= 0xa0 and kind < 0xc0 then
      return bytes(kind - 0xa0)
    elseif kind >= 0x90 and kind < 0xa0 then
      return array(kind - 0x90)
    end
    return (readers[kind] or error('MessagePack kind ' .. kind .. ' is not known here'))()
  end

  return value()
end
"""


class TurningServer(FakeServer):
    """A fake server whose workers take turns, as they do where there is a connection to share."""


class PostingStore(Store):
    """Carries out posted calls, though fakeredis has no connection to post them on."""

    idle = True  # as a connection is that has answered all

    def route(self, key: str) -> SharedConnection:
        """There is none, and it is always open."""
        return cast(SharedConnection, self)

    def post(self, connection: SharedConnection, call: Call, on_answer: OnAnswer) -> None:
        """Make a call, which begins at once."""
        eager.start(self._carry_out(call, on_answer))

    async def _carry_out(self, call: Call, on_answer: OnAnswer) -> None:
        script, keys, arguments = call
        try:
            answer: Any = await self.run(script, keys, *arguments)
        except BrokerError as error:
            answer = error
        on_answer(answer)


@cache
def _fake_scripts(*, timed: bool = False) -> Scripts:
    """The scripts with what fakeredis lacks in front."""
    sources = with_test_clock(read_sources()) if timed else read_sources()
    return Scripts({**sources, "lib/prelude": CMSGPACK + sources["lib/prelude"]}, shebang=False)


def fake_engine(server: FakeServer | None = None, *, timed: bool = False) -> Engine:
    """An engine on a fake server, else on an empty one; each call under way takes one of its connections."""
    redis = FakeAsyncRedis(
        server=server or FakeServer(), decode_responses=True, protocol=2, max_connections=1_000
    )
    store = PostingStore if isinstance(server, TurningServer) else Store
    return Engine(store(redis, _fake_scripts(timed=timed)))


class FakeTime(ManualTime):
    """An engine on an empty fake server, on a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.engine = fake_engine(timed=True)
        self.now_ms = 1_000_000
