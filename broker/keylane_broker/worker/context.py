"""What connections, and the handlers of their requests, need of a worker."""

from collections.abc import Callable
from dataclasses import dataclass

from keylane_broker.access.control import AccessControl
from keylane_broker.access.rates import PublishRates
from keylane_broker.cluster.membership import Membership
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.worker.background import Background
from keylane_broker.worker.body_deletion import BodyDeletion
from keylane_broker.worker.clock import Clock
from keylane_broker.worker.connections import Connections
from keylane_broker.worker.outboxes import Outboxes
from keylane_broker.worker.partitions import Partitions
from keylane_broker.worker.session_renewal import Sessions


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of a worker."""

    settings: Settings
    release: str  # of Keylane
    payloads: str  # where clients have their bodies, unless they say otherwise
    http_address: Callable[[], str]  # where this worker speaks HTTP, "" where it does not
    payloads_beside: bool  # what is on the disk of Redis, or its replica, of a message is so of its body
    session_ms: int
    access: AccessControl
    rates: PublishRates
    engine: Engine
    clock: Clock
    background: Background
    membership: Membership
    partitions: Partitions
    sessions: Sessions
    connections: Connections
    bodies: BodyDeletion
    outboxes: Outboxes
