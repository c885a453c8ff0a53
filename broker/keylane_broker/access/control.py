"""Who is let in: static tokens, which are in Redis as hashes, and JWTs."""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keylane.errors import InvalidArgument, Unauthorized
from keylane_broker.access.identity import EVERYBODY, WORKER, Grant, Identity, parse_grant
from keylane_broker.access.jwt_keys import JwtKeys
from keylane_broker.store.keys import TOKENS, check_name
from keylane_broker.store.store import Store

_TEXT = re.compile(r"kl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_AGAIN = 0.2  # seconds between two looks for a token that is not known: anybody can show one
_OWN = "#own"  # the field with the secret by which workers know each other; no token has this id
_ADMIN = Identity("admin", EVERYBODY.grants)


class StoredToken(msgspec.Struct, frozen=True):
    """A token as Redis has it."""

    name: str
    digest: str  # SHA-256 of its secret, which has 256 bits: nothing slower is needed
    grants: list[str]
    created_ms: int
    expires_ms: int = 0  # 0: never


class AccessControl:
    """Who may come in; where that is switched off, everybody."""

    def __init__(self, store: Store, *, enabled: bool, admin_token: str, jwt_keys: Path | None) -> None:
        self.enabled = enabled
        self._store = store
        self._admin = hashlib.sha256(admin_token.encode()).digest() if admin_token else None
        self._jwt = JwtKeys(jwt_keys) if enabled and jwt_keys is not None else None
        self._known: dict[str, tuple[StoredToken, Identity]] = {}
        self._texts: dict[str, str] = {}  # of these, as Redis has them
        self._refreshed = 0.0  # when the last reading of tokens began, by the monotonic clock
        self._looking = asyncio.Lock()  # for a token that is not known
        self.own_token = ""  # by which this worker is let in by the others

    async def open(self) -> None:
        """Learn the tokens, and the one that workers have among themselves."""
        if self.enabled:
            await self._store.read_all([("HSETNX", TOKENS, _OWN, secrets.token_urlsafe(32))])
            await self.refresh()

    async def refresh(self) -> None:
        """Learn what has been made and revoked since."""
        if not self.enabled:
            return
        if self._jwt is not None:
            self._jwt.refresh()
        began = time.monotonic()
        stored = await self._store.fields(TOKENS)
        self._refreshed = began
        self.own_token = stored.pop(_OWN, "")
        before, self._texts = self._texts, stored
        changed = {id: text for id, text in stored.items() if before.get(id) != text}
        read = {id: (token, _identity(id, token)) for id, token in _decoded(changed).items()}
        self._known = {id: read.get(id) or self._known[id] for id in stored}

    async def identify(self, token: str) -> Identity:
        """Return who somebody is. Raises Unauthorized for a token that is missing, unknown or expired."""
        if not self.enabled:
            return EVERYBODY
        if not token:
            raise Unauthorized(
                "this broker needs a token: token=… or KEYLANE_TOKEN, over HTTP a bearer token"
            )
        for secret, who in ((self.own_token, WORKER), (self._admin, _ADMIN)):
            if secret and _same(token, secret):
                return who
        if found := _TEXT.fullmatch(token):
            identity = self._static(*found.groups())
            if identity is None:  # it may have just been made
                await self._look_again(time.monotonic())
                identity = self._static(*found.groups())
            if identity is None:
                raise Unauthorized("the token is not known, or was revoked")
        elif self._jwt is not None:
            identity = self._jwt.identify(token)
        else:
            raise Unauthorized("the token is not known")
        self.check(identity)
        return identity

    async def _look_again(self, asked: float) -> None:
        """Read the tokens after an instant: one reading for all who wait, and not too soon after the last."""
        async with self._looking:
            if self._refreshed < asked:
                await asyncio.sleep(max(0.0, self._refreshed + _AGAIN - time.monotonic()))
                await self.refresh()

    def check(self, identity: Identity) -> None:
        """Raise Unauthorized if somebody who was let in is to go: revoked, or expired."""
        if identity.token and identity.token not in self._known:
            raise Unauthorized(f"the token of {identity.name!r} was revoked")
        if identity.expires and identity.expires < time.time():
            raise Unauthorized(f"the token of {identity.name!r} has expired")
        if identity.key and self._jwt is not None and not self._jwt.trusts(identity.key):
            raise Unauthorized(f"the key that has signed for {identity.name!r} is not trusted any more")

    def _static(self, id: str, secret: str) -> Identity | None:
        known = self._known.get(id)
        if known is None or not hmac.compare_digest(known[0].digest, _digest(secret)):
            return None
        return known[1]

    # What administrators do

    async def create(
        self, name: str, grants: Sequence[str], lifetime_ms: int, now_ms: int
    ) -> tuple[str, str]:
        """Make a token; returns its id and its text, which nobody can find out again."""
        check_name("token", name)
        if not grants:
            raise InvalidArgument("a token that allows nothing: name at least one permission")
        texts = [str(parse_grant(text)) for text in grants]
        id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        token = StoredToken(name, _digest(secret), texts, now_ms, now_ms + lifetime_ms if lifetime_ms else 0)
        await self._store.read_all([("HSET", TOKENS, id, msgspec.json.encode(token).decode())])
        await self.refresh()
        return id, f"kl_{id}_{secret}"

    async def tokens(self) -> dict[str, StoredToken]:
        """Return all tokens, by id."""
        stored = await self._store.fields(TOKENS)
        stored.pop(_OWN, None)
        return _decoded(stored)

    async def revoke(self, id: str) -> None:
        """Let a token count no more. Raises InvalidArgument if there is none of that id."""
        [removed] = await self._store.read_all([("HDEL", TOKENS, id)]) if id != _OWN else [0]
        if not removed:
            raise InvalidArgument(f"no token {id!r:.60}; `keylane token list` has their ids")
        await self.refresh()


def _same(token: str, secret: str | bytes) -> bool:
    if isinstance(secret, bytes):
        return hmac.compare_digest(hashlib.sha256(token.encode()).digest(), secret)
    return hmac.compare_digest(token.encode(), secret.encode())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _decoded(stored: dict[str, str]) -> dict[str, StoredToken]:
    return {id: msgspec.json.decode(text, type=StoredToken) for id, text in stored.items()}


def _identity(id: str, token: StoredToken) -> Identity:
    grants: tuple[Grant, ...] = tuple(map(parse_grant, token.grants))
    return Identity(token.name, grants, id, token.expires_ms / 1_000)
