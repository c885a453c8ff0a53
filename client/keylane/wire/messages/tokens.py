"""Requests about tokens, by which clients are let in."""

import msgspec

from keylane.wire.frames import Properties, Type


class CreateToken(Properties, frozen=True):
    """CREATE_TOKEN: make a token; answered by OK with TokenReply."""

    TYPE = Type.CREATE_TOKEN

    name: str  # whose it is
    grants: list[str]  # "produce:orders.*": action and pattern of topics
    lifetime_ms: int = 0  # 0: for ever


class TokenReply(Properties, frozen=True):
    """A token that was made."""

    id: str
    token: str  # which nobody is told again


class Tokens(Properties, frozen=True):
    """TOKENS: list all; answered by OK, with an array of TokenAbout as its body."""

    TYPE = Type.TOKENS


class TokenAbout(msgspec.Struct, frozen=True, array_like=True):
    """What there is to know of a token."""

    id: str
    name: str
    grants: list[str]
    created_ms: int
    expires_ms: int  # 0: never


class RevokeToken(Properties, frozen=True):
    """REVOKE_TOKEN: let a token count no more, also on open connections; answered by OK."""

    TYPE = Type.REVOKE_TOKEN

    id: str
