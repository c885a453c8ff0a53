"""What the parts of the client for code that does not await have in common."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from keylane.async_client import AsyncClient

T = TypeVar("T")


class Calls(ABC):
    """Calls an AsyncClient from threads that wait."""

    _client: AsyncClient

    @abstractmethod
    def _call(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Run it on the event loop and wait."""
