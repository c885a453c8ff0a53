"""How a connection begins and ends, and what either side may hear at any time."""

import msgspec

from keylane.wire.frames import Properties, Type


class Info(Properties, frozen=True):
    """INFO: the first frame of a connection, and later whenever the client wants to know."""

    TYPE = Type.INFO

    versions: tuple[int, int] = (1, 1)  # oldest and newest; the default is for ever, whatever VERSION is
    token: str = ""
    client: str = ""  # who this is, for logs
    topic: str = ""  # whose partition map is wanted too; MOVED tells from then on when it has changed
    store: str = ""  # the payload store that it can delete from when it is asked: "advertised" or its "own"


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where a worker listens."""

    id: str
    address: str  # host:port


class InfoReply(Properties, frozen=True):
    """The worker's answer: the version spoken from now on, and what to know of the cluster."""

    version: int
    worker: str
    release: str
    workers: list[WorkerAddress]
    time_ms: int  # the cluster's clock, which is that of Redis
    payloads: str  # URL of the payload store that clients use unless told otherwise, "" for none
    payload_lifetime_ms: int
    heartbeat_ms: int
    session_ms: int
    max_frame: int
    owners: list[int] = []  # of the topic asked for: for each partition the owner's place in `workers`, or -1
    # The store is the server that has the messages: bodies are as safe as these.
    payloads_beside: bool = False
    incarnation: int = 0  # of the topic asked for: another one of that name has another
    inline: int = 0  # of the topic asked for: bodies of up to so many bytes are inline
    http: str = ""  # host:port where this worker speaks HTTP to clients, "" where it does not


class Moved(Properties, frozen=True):
    """MOVED: some partitions of a topic have new owners; INFO tells which. Not answered."""

    TYPE = Type.MOVED

    topic: str


class DeleteBodies(Properties, frozen=True):
    """DELETE_BODIES: nobody needs the bodies any more whose names are the body of this frame.

    The client deletes them and then answers with OK, under the same sequence, as it does HEARTBEAT.
    """

    TYPE = Type.DELETE_BODIES

    topic: str


class Heartbeat(Properties, frozen=True):
    """HEARTBEAT; answered by OK with no properties, whose timestamp is the other side's clock."""

    TYPE = Type.HEARTBEAT


class Error(Properties, frozen=True):
    """ERROR: `code` is one of keylane.errors. With sequence 0 and a stream, that consumer has ended."""

    TYPE = Type.ERROR

    code: str
    message: str
    stored: bool = False  # of durability_not_reached
    stream: int | None = None
    retry_ms: int = 0  # of overloaded: in how long it may be tried again, 0 where nobody knows


class Redirect(Properties, frozen=True):
    """REDIRECT: the partition is served elsewhere; in answer to a request, which has changed nothing.

    With sequence 0 and a stream: this worker serves the partition to that consumer no more. What it holds
    stays leased, to be settled with the new owner once it has subscribed there, and `permits` of its limit
    here have gone with that.
    """

    TYPE = Type.REDIRECT

    topic: str
    partition: int
    address: str = ""  # "" where the worker does not know
    stream: int | None = None
    permits: int = 0
