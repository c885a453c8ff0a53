"""Tokens: made, listed and revoked by administrators."""

from keylane import wire
from keylane_broker.engine.checks import check_int
from keylane_broker.limits import MAX_MS
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import DONE, Reply


async def create_token(context: Context, _: Connection, request: wire.CreateToken, __: memoryview) -> Reply:
    check_int("lifetime_ms", request.lifetime_ms, 0, MAX_MS)
    id, text = await context.access.create(
        request.name, request.grants, request.lifetime_ms, context.clock.now_ms()
    )
    return wire.TokenReply(id, text), b""


async def tokens(context: Context, _: Connection, __: wire.Tokens, ___: memoryview) -> Reply:
    found = [
        wire.TokenAbout(id, token.name, token.grants, token.created_ms, token.expires_ms)
        for id, token in sorted((await context.access.tokens()).items())
    ]
    return wire.Properties(), wire.pack(found)


async def revoke_token(context: Context, _: Connection, request: wire.RevokeToken, __: memoryview) -> Reply:
    await context.access.revoke(request.id)
    await context.engine.announce("tokens")
    return DONE
