"""A worker as a process of its own, run by the supervisor: `python -m keylane_broker.process`.

The order comes as one line of JSON on stdin, which then stays open: when it closes the supervisor is gone,
and so is the worker at once. The report goes to stdout as one line of JSON, `{"address": …}` when the
worker serves or `{"error": …}` if it cannot. Two signals stop it in good order: SIGTERM, and other
workers have its partitions before it ends; SIGINT, where nobody is to take them over because all stop.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
from io import FileIO
from typing import NoReturn

import anyio

from keylane.errors import BrokerError
from keylane_broker.config import Settings
from keylane_broker.errors import ServerError
from keylane_broker.http.port import HttpPort
from keylane_broker.logs import start_logging
from keylane_broker.ports import listening_failed
from keylane_broker.worker.worker import Worker

__all__ = ["main"]

log = logging.getLogger("keylane.broker")

STDIN = 0
_reported: list[bool] = []


def main() -> None:
    """Serve as ordered until a signal comes."""
    # Not sys.stdin: Python cannot end in peace while a thread reads from that.
    if sys.argv[1:]:
        sys.exit("workers take no arguments: `keylane serve` starts them")
    order = json.loads(FileIO(STDIN, closefd=False).readline())
    settings = Settings.model_validate(order["settings"])
    threading.Thread(target=_die_with_the_supervisor, daemon=True).start()
    start_logging(settings.log_level, order["worker_id"], form=settings.log_format)
    # What has been imported stays; and a worker makes much garbage, but hardly any in cycles: a pause of some
    # milliseconds to look for these must not come often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        anyio.run(
            _serve, settings, order["redis_url"], order["worker_id"], backend_options={"use_uvloop": True}
        )
    except Exception as group:
        # Not except*, out of which sys.exit() is a traceback up to Python 3.11.3.
        match _first(group):
            case BrokerError() as error:
                _end(str(error))
            case ServerError() as error:
                _end(str(error))
            case OSError() as error:
                _end(listening_failed(settings.host, settings.port, error))
            case _:
                raise


async def _serve(settings: Settings, redis_url: str, worker_id: str) -> None:
    worker = Worker(settings, redis_url, worker_id=worker_id)
    http = HttpPort(settings, worker)
    async with anyio.create_task_group() as tasks:

        async def open_http() -> None:
            await http.open()
            _report(address=worker.address)

        def begin() -> None:
            tasks.start_soon(open_http)

        tasks.start_soon(_stop_on_signal, worker, http)
        await worker.serve(begin)
        tasks.cancel_scope.cancel()


async def _stop_on_signal(worker: Worker, http: HttpPort) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            await http.close()  # first: it asks the worker for what it answers
            worker.stop(hand_over=number == signal.SIGTERM)


def _die_with_the_supervisor() -> None:
    os.read(STDIN, 1)
    os._exit(1)


def _report(**what: str) -> None:
    print(json.dumps(what), flush=True)
    _reported.append(True)


def _end(why: str) -> NoReturn:
    """Tell the supervisor, who tells everybody; later, when it listens no more, the log."""
    if _reported:
        log.error("the worker ends: %s", why)
    else:
        _report(error=why)
    sys.exit(1)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
