"""`keylane serve`: run a broker until a signal comes."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane_broker.commandline.command import Globals, JsonOption, Session, Usage

if TYPE_CHECKING:
    from anyio import CancelScope

    from keylane_broker.config import Settings
    from keylane_broker.supervise.supervisor import Running

__all__ = ["add_serve", "cancel_on_signal"]


def flag(text: str, metavar: str) -> Any:
    """An option for one of the settings, which says itself what is right."""
    return typer.Option(help=text, metavar=metavar, show_default=False, rich_help_panel="Settings")


def add_serve(app: typer.Typer) -> None:
    """Make it a command."""
    app.command("serve")(serve)


# The texts repeat those of config.py, whose import would slow every command down; a test compares.
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, flag("Address to listen on.", "HOST")] = None,
    port: Annotated[
        str | None,
        flag("Port of the first worker, the next ones listen on those after it; 0 picks free ones.", "N"),
    ] = None,
    workers: Annotated[str | None, flag("Worker processes.", "N")] = None,
    redis: Annotated[
        str | None, flag("URL of Redis or Valkey; without it one is started here.", "URL")
    ] = None,
    data_dir: Annotated[str | None, flag("Where the embedded server keeps its data.", "DIR")] = None,
    advertise: Annotated[
        str | None,
        flag(
            "host or host:port that clients are told; a port is the first worker's, as with --port.",
            "ADDRESS",
        ),
    ] = None,
    max_connections: Annotated[str | None, flag("Client connections of one worker.", "N")] = None,
    max_frame: Annotated[str | None, flag("Bytes of the largest frame.", "SIZE")] = None,
    heartbeat: Annotated[str | None, flag("Seconds of silence before a heartbeat is sent.", "S")] = None,
    session: Annotated[
        str | None, flag("Seconds until the leases of a lost consumer come back.", "S")
    ] = None,
    partition_lease: Annotated[
        str | None, flag("Seconds until a lost worker's partitions are free.", "S")
    ] = None,
    rebalance_interval: Annotated[
        str | None, flag("Seconds between looks at the load, each of which may move a partition.", "S")
    ] = None,
    default_partitions: Annotated[str | None, flag("Partitions of a topic that does not say.", "N")] = None,
    max_partitions: Annotated[str | None, flag("Partitions that one topic may have.", "N")] = None,
    max_inflight_bytes: Annotated[
        str | None,
        flag("Bytes of publishes that may wait for Redis in one worker, and of unfinished frames.", "SIZE"),
    ] = None,
    max_unsent_bytes: Annotated[
        str | None,
        flag(
            "Bytes that may wait in one worker for clients to read; beyond, the slowest are closed.", "SIZE"
        ),
    ] = None,
    payloads: Annotated[
        str | None, flag("URL of the payload store for clients; by default the same Redis.", "URL")
    ] = None,
    payload_lifetime: Annotated[
        str | None, flag("Seconds that a body stays which no message needs.", "S")
    ] = None,
    stop_timeout: Annotated[str | None, flag("Seconds that a worker has to stop in good order.", "S")] = None,
    log_level: Annotated[str | None, flag("Least log level.", "LEVEL")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="KEYLANE_CONFIG", help="TOML or JSON file of these settings."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a broker: workers and, unless --redis says where one is, a Valkey to keep everything in.

    Every setting can also be KEYLANE_… in the environment, or a key of the file. SIGHUP replaces one worker
    after the other, SIGTERM and Ctrl-C stop them all.
    """
    flags = {name: value for name, value in ctx.params.items() if name not in ("config", "json")}
    before: Globals = ctx.find_root().obj
    run = Session(before.server, json or before.json)
    raise typer.Exit(run.run(_serve(run, config, flags)))


async def _serve(session: Session, file: Path | None, flags: dict[str, str | None]) -> None:
    import anyio

    from keylane_broker.logs import start_logging
    from keylane_broker.supervise.supervisor import supervise

    settings = _settings(file, flags)
    start_logging(settings.log_level)
    hangs_up = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        with anyio.open_signal_receiver(signal.SIGHUP) as hangups:
            async with supervise(settings) as broker:
                session.say(_about(broker), _sentence(broker))
                async for _ in hangups:
                    if hangs_up and not _has_terminal():
                        break  # nobody has asked for a restart: the window was closed
                    broker.restart()
        tasks.cancel_scope.cancel()


def _settings(file: Path | None, flags: dict[str, str | None]) -> "Settings":
    from keylane_broker.config import ConfigError, load

    try:
        return load(file, **flags)
    except ConfigError as error:
        raise Usage(str(error)) from None


def _has_terminal() -> bool:
    """Whether this process runs in a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def cancel_on_signal(scope: "CancelScope") -> None:
    """Leave in good order when Ctrl-C or SIGTERM says so."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


def _about(broker: "Running") -> dict[str, object]:
    from keylane.payloads import public

    return {
        "address": broker.url,
        "redis": public(broker.redis_url),
        "pid": os.getpid(),
        "workers": [
            {"id": worker.id, "address": worker.address, "pid": worker.pid} for worker in broker.workers
        ],
    }


def _sentence(broker: "Running") -> str:
    from keylane.payloads import public

    kept = f", data in {broker.server.data_dir}" if broker.server else ""
    return f"keylane is ready at {broker.url} (redis at {public(broker.redis_url)}{kept})"
