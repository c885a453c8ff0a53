"""Tokens: who is let in by the broker, and what they may do."""

from collections.abc import Iterable

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.errors import InvalidArgument
from keylane.times import Seconds, milliseconds, moment
from keylane.types import NewToken, TokenInfo
from keylane.wire import properties_of, unpack


class Tokens:
    """What administrators do with tokens."""

    _cluster: Cluster

    async def create_token(
        self, name: str, allow: Iterable[str], *, lifetime: Seconds | None = None
    ) -> NewToken:
        """Create a token for somebody; it is told once. `allow` lists permissions: action and topics.

        >>> token = await client.create_token("shop", ["produce:orders.*", "consume:refunds"])
        """
        if isinstance(allow, str):
            raise InvalidArgument(f"allow is {allow!r:.60}: use a list of permissions")
        question = wire.CreateToken(name, list(allow), milliseconds("lifetime", lifetime) or 0)
        said = properties_of(await self._cluster.request(question, repeatable=False), wire.TokenReply)
        return NewToken(said.id, said.token)

    async def tokens(self) -> list[TokenInfo]:
        """Return all tokens; their secrets nobody knows."""
        answer = await self._cluster.request(wire.Tokens())
        return [
            TokenInfo(
                one.id,
                one.name,
                one.grants,
                moment(one.created_ms),
                moment(one.expires_ms) if one.expires_ms else None,
            )
            for one in unpack(answer.body, list[wire.TokenAbout])
        ]

    async def revoke_token(self, id: str) -> None:
        """Let a token count no more; whoever uses it is disconnected within seconds."""
        await self._cluster.request(wire.RevokeToken(id), repeatable=False)
