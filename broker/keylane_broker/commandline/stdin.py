"""What comes by stdin, waited for so that Ctrl-C ends it: while Python reads, the event loop cannot."""

import os
import sys

__all__ = ["read_all", "read_line"]

LOOK_SECONDS = 0.2
PIECE = 65_536


async def read_line() -> str:
    """A line that somebody types; "" at the end."""
    await _until_readable()
    return sys.stdin.readline()


async def read_all() -> bytes:
    """Everything up to the end."""
    pieces: list[bytes] = []
    while not pieces or pieces[-1]:
        await _until_readable()
        pieces.append(os.read(sys.stdin.fileno(), PIECE))
    return b"".join(pieces)


async def _until_readable() -> None:
    """Not by the event loop, which cannot watch a file, and leaves a terminal changed for the shell."""
    import select

    import anyio.to_thread

    while not (await anyio.to_thread.run_sync(select.select, [sys.stdin], [], [], LOOK_SECONDS))[0]:
        pass
