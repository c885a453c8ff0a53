"""Ctrl-C and SIGTERM end a command in good order."""

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from anyio import CancelScope

__all__ = ["cancel_on_signal"]


async def cancel_on_signal(scope: "CancelScope") -> None:
    """Cancel a scope when Ctrl-C or SIGTERM comes."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
