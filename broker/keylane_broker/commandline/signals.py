"""Ctrl-C and SIGTERM end a command in good order."""

import signal

import anyio

__all__ = ["cancel_on_signal"]


async def cancel_on_signal(scope: anyio.CancelScope) -> None:
    """Cancel a scope when Ctrl-C or SIGTERM comes."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
