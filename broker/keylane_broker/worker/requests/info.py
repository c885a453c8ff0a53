"""How a connection begins: the client says who it is, and hears who serves what."""

import asyncio

from keylane import wire
from keylane.errors import Forbidden, IncompatibleVersion, InvalidArgument, Unauthorized
from keylane_broker.access.identity import Identity
from keylane_broker.engine.values import TopicSettings
from keylane_broker.worker.body_deletion import ADVERTISED, OWN
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply

_CLIENT = 100  # characters of who a client says it is, in the log


def _other(identity: Identity, before: Identity) -> bool:
    """Whether it is not the same somebody, whose JWT may be a newer one."""
    return identity._replace(expires=0) != before._replace(expires=0)


async def info(context: Context, connection: Connection, request: wire.Info, _: memoryview) -> Reply:
    oldest, newest = request.versions
    if newest < wire.OLDEST_VERSION or oldest > wire.VERSION or oldest > newest:
        asyncio.get_running_loop().call_soon(connection.close)  # once this has been said
        raise IncompatibleVersion(
            f"the client speaks versions {oldest} to {newest} of the protocol, the broker "
            f"{wire.OLDEST_VERSION} to {wire.VERSION}: update the older one"
        )
    if request.store not in ("", OWN, ADVERTISED):
        raise InvalidArgument(f"store is {request.store!r:.60}: use {ADVERTISED}, {OWN} or nothing")
    try:
        identity = await context.access.identify(request.token)
    except Unauthorized:
        asyncio.get_running_loop().call_soon(connection.close)
        raise
    if request.topic:
        identity.require("observe", request.topic)
    if (connection.streams or connection.opening) and _other(identity, connection.identity):
        raise Forbidden("this connection has another token's consumers: open a new one for this token")
    if request.client and not connection.greeted:
        connection.peer += f" {request.client[:_CLIENT]!r}"
    connection.let_in(identity)
    version = min(newest, wire.VERSION)
    connection.several = version >= wire.SEVERAL
    if request.store and request.store != connection.store:
        connection.store = request.store
        context.bodies.joined()
    settings, membership = context.settings, context.membership
    topic, owners = TopicSettings(), list[str]()
    if request.topic:
        topic, owners = await membership.placement(request.topic)
        connection.topics.add(request.topic)
    workers = [report for report in membership.workers.values() if report.address]
    places = {report.id: place for place, report in enumerate(workers)}
    return (
        wire.InfoReply(
            version=version,
            worker=membership.id,
            release=context.release,
            workers=[wire.WorkerAddress(report.id, report.address) for report in workers],
            time_ms=context.clock.now_ms(),
            payloads=context.payloads,
            payload_lifetime_ms=round(settings.payload_lifetime * 1_000),
            heartbeat_ms=round(settings.heartbeat * 1_000),
            session_ms=context.session_ms,
            max_frame=int(settings.max_frame),
            owners=[places.get(owner, -1) for owner in owners],
            payloads_beside=context.payloads_beside,
            incarnation=topic.incarnation,
            inline=topic.inline,
            http=context.http_address(),
        ),
        b"",
    )
