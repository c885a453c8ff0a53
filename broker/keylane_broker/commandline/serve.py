"""`keylane serve`: run a broker until a signal comes."""

import inspect
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from keylane.commandline.command import Globals, JsonOption, help_of
from keylane.commandline.output import UsageError
from keylane.payloads import public
from keylane_broker.commandline.command import BrokerRun
from keylane_broker.commandline.signals import cancel_on_signal

if TYPE_CHECKING:  # slow to import
    from keylane_broker.config import Settings
    from keylane_broker.supervise.supervisor import Running

__all__ = ["add_serve"]


log = logging.getLogger("keylane.broker")

MIB = 1024 * 1024
FLAGS = "keylane.settings"  # where the command has the flags that are settings, by name


class ServeCommand(TyperCommand):
    """The command with a flag for each setting; these are imported when they are looked at, which is slow."""

    _flags: tuple[Any, ...] = ()

    def get_params(self, ctx: Any) -> Any:
        """Return the flags of all settings, then those of the command itself."""
        if not self._flags:
            self._flags = setting_flags()
            self.params[:0] = self._flags
        return super().get_params(ctx)

    def invoke(self, ctx: Any) -> Any:
        """Keep the settings apart from the arguments of the function."""
        ctx.meta[FLAGS] = {flag.name: ctx.params.pop(flag.name) for flag in self._flags}
        return super().invoke(ctx)


def setting_flags() -> tuple[Any, ...]:
    """Return an option for each setting, which takes any text: the settings themselves say what is right."""
    from keylane_broker.config import Settings, metavar_of

    def flags() -> None:
        pass

    annotations = {
        name: Annotated[
            bool | None if field.annotation is bool else str | None,
            typer.Option(
                help=field.description,
                metavar=metavar_of(name),
                show_default=_shown(field.default),
                rich_help_panel="Settings",
            ),
        ]
        for name, field in Settings.model_fields.items()
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    flags.__annotations__ = annotations
    flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(flags)
    return tuple(typer.main.get_command(app).params)


def _shown(default: Any) -> str | bool:
    """Return a default as people write it; False for none."""
    if isinstance(default, int) and default >= MIB:
        return f"{default // MIB}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default) or False


def add_serve(app: typer.Typer) -> None:
    """Make it a command."""
    app.command("serve", cls=ServeCommand, help=help_of(serve))(serve)


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="KEYLANE_CONFIG", help="TOML or JSON file of these settings."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve a broker: workers and, unless --redis is given, an embedded Valkey that keeps everything.

    Every setting can also be given as KEYLANE_… in the environment or as a key of the file. SIGHUP restarts
    the workers one by one; SIGTERM and Ctrl-C stop them all.
    """
    before: Globals = ctx.find_root().obj
    run = BrokerRun(before.server, json or before.json)
    arguments = {"file": config, "flags": ctx.meta[FLAGS]}
    raise typer.Exit(run.execute(lambda: run.call(_serve, arguments)))


async def _serve(run: BrokerRun, file: Path | None, flags: dict[str, str | None]) -> None:
    import anyio

    from keylane_broker.config import nearly_settings
    from keylane_broker.logs import start_logging
    from keylane_broker.supervise.supervisor import supervise

    settings = _settings(file, flags)
    start_logging(settings.log_level, form=settings.log_format)
    for problem in nearly_settings():
        log.warning(problem)
    hangs_up = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        with anyio.open_signal_receiver(signal.SIGHUP) as hangups:
            async with supervise(settings) as broker:
                run.say(_about(broker), _sentence(broker))
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
        raise UsageError(str(error)) from None


def _has_terminal() -> bool:
    """Whether this process runs in a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _about(broker: "Running") -> dict[str, object]:
    return {
        "address": broker.url,
        "http": broker.http_url or None,
        "redis": public(broker.redis_url),
        "pid": os.getpid(),
        "workers": [
            {"id": worker.id, "address": worker.address, "pid": worker.pid} for worker in broker.workers
        ],
    }


def _sentence(broker: "Running") -> str:
    kept = f", data in {broker.server.data_dir}" if broker.server else ""
    http = f" and {broker.http_url}" if broker.http_url else ""
    return f"keylane is ready at {broker.url}{http} (redis at {public(broker.redis_url)}{kept})"
