"""Over which connection each lease was taken: what is done under it goes to that server, and to no other."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence

from keylane_broker.store.connection import Displaced, SharedConnection


class LeaseHomes:
    """The one place that knows where a lease is good.

    A server that takes another's place may lack its newest writes, though not the lease: it would give the
    ids of those a second time. So there the lease is none, and has to be taken anew. `way_to` tells the
    connection to the server that holds a key now, if it is open; `on_lost` hears of leases that are no more.
    """

    def __init__(
        self,
        way_to: Callable[[str], SharedConnection | None],
        on_lost: Callable[[Collection[str]], None],
    ) -> None:
        self._way_to = way_to
        self._on_lost = on_lost
        self._homes: dict[str, SharedConnection] = {}  # by the key of the lease

    def settle(self, lease: str, connection: SharedConnection) -> None:
        """A lease was taken over a connection."""
        self._homes[lease] = connection

    def home_of(self, lease: str) -> SharedConnection | None:
        """Return the connection over which a lease was taken, if it is good there still."""
        return self._homes.get(lease)

    def check(self, leases: Sequence[str], connection: SharedConnection | None) -> None:
        """Raise Displaced unless all these leases were taken over this connection."""
        for lease in leases:
            if connection is None or self._homes.get(lease) is not connection:
                self.lose_displaced()
                raise Displaced("another server has taken its place, where the lease is to be taken anew")

    async def recognise(
        self, patience: float, way: Callable[[SharedConnection], SharedConnection] = lambda home: home
    ) -> None:
        """Leave the servers that have been promoted since leases were taken there; `way` is to ask them."""

        async def look(connection: SharedConnection) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    life = await way(connection).learn_life()
                    if life and connection.life not in ("", life):
                        connection.close("the server was promoted")

        await asyncio.gather(*map(look, set(self._homes.values())))

    def lose_displaced(self) -> None:
        """Lose the leases on keys that another server holds now."""
        self._lose([lease for lease, home in self._homes.items() if self._way_to(lease) is not home])

    def lose_all_of(self, connection: SharedConnection) -> None:
        """Lose the leases that were taken over a connection."""
        self._lose([lease for lease, home in self._homes.items() if home is connection])

    def _lose(self, leases: list[str]) -> None:
        for lease in leases:
            del self._homes[lease]
        self._on_lost(frozenset(leases))
