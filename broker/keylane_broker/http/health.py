"""How a worker is, for whoever starts it again or sends requests to it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keylane.errors import Unavailable
from keylane_broker.http.problems import problem
from keylane_broker.http.values import Health
from keylane_broker.worker.worker import Worker

_WELL = msgspec.json.encode(Health("ok"))


def health_routes(worker: Worker) -> list[Route]:
    """Return /healthz, which says that the process answers, and /readyz, that it can serve."""

    async def alive(_: Request) -> Response:
        return Response(_WELL, media_type="application/json")

    async def ready(_: Request) -> Response:
        if trouble := await worker.trouble():
            return problem(503, Unavailable.code, trouble, retry=True)
        return Response(_WELL, media_type="application/json")

    return [Route("/healthz", alive), Route("/readyz", ready)]
