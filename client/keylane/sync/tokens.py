"""Tokens, for code that does not await; see keylane.tokens."""

from collections.abc import Iterable

from keylane.sync.calls import Calls
from keylane.times import Seconds
from keylane.types import NewToken, TokenInfo


class SyncTokens(Calls):
    """What administrators do with tokens."""

    def create_token(self, name: str, allow: Iterable[str], *, lifetime: Seconds | None = None) -> NewToken:
        """Create a token for somebody; it is told once."""
        return self._call(self._client.create_token, name, allow, lifetime=lifetime)

    def tokens(self) -> list[TokenInfo]:
        """Return all tokens; their secrets nobody knows."""
        return self._call(self._client.tokens)

    def revoke_token(self, id: str) -> None:
        """Let a token count no more; whoever uses it is disconnected within seconds."""
        self._call(self._client.revoke_token, id)
