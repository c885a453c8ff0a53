"""`keylane demo`: start a broker, take a guided tour of it, and leave it running."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

import keylane
from keylane.errors import TopicNotFound
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.signals import cancel_on_signal
from keylane_broker.errors import AddressInUse

if TYPE_CHECKING:
    from keylane_broker.supervise.supervisor import Running

__all__ = ["add_demo"]

TOPIC = "orders"
SESSION_SECONDS = 2.0  # so that nobody waits long for what the killed consumer held


def add_demo(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "demo")(demo)


async def demo(
    run: BrokerRun,
    once: Annotated[bool, typer.Option("--once", help="Exit after the tour.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the data in this folder instead of discarding it.", show_default=False),
    ] = None,
) -> None:
    """Start a broker and show step by step what it does; with --server, use that broker."""
    import anyio

    finished = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        if run.named_server:
            await _tour(run, run.server, f"demo-{token_hex(3)}", None)
            finished = True
        else:
            async with _broker(data_dir, port=0 if once else None) as broker:
                await _tour(run, broker.url, TOPIC, broker)
                finished = True
                if not once:
                    _hand_over(run, broker)
                    await anyio.sleep_forever()
        tasks.cancel_scope.cancel()
    if not finished:
        raise KeyboardInterrupt


@contextlib.asynccontextmanager
async def _broker(data_dir: Path | None, port: int | None) -> AsyncIterator["Running"]:
    """Start one; where the port of the settings is taken it gets another, because this is only a demo."""
    from keylane_broker.config import load
    from keylane_broker.logs import start_logging
    from keylane_broker.ports import check_free
    from keylane_broker.supervise.supervisor import ports_of, supervise

    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keylane-demo-")))
        settings = load(port=port, redis="", data_dir=data_dir, session=SESSION_SECONDS, log_level="warning")
        start_logging(settings.log_level)
        try:
            check_free(settings.host, [port for ports in ports_of(settings) for port in ports])
        except AddressInUse:
            settings = settings.model_copy(update={"port": 0})
        async with supervise(settings) as broker:
            yield broker


async def _tour(run: BrokerRun, server: str, topic: str, broker: "Running | None") -> None:
    """Show everything; on somebody else's broker nothing is left behind."""
    from keylane_broker.commandline.tour import Tour

    if broker and not run.json:
        run.out.print(f"A broker is up at {broker.url},\nits Valkey at {broker.redis_url}.", markup=False)
    async with keylane.AsyncClient(server) as client:
        tour = Tour(client, server, topic, run)
        with contextlib.suppress(TopicNotFound):
            await client.delete_topic(topic)  # of an earlier run
        try:
            await tour.walk()
            if broker:
                await tour.check(broker.redis_url)
        finally:
            if not broker:
                await client.delete_topic(topic)
    about = {"ok": True, "server": server, "steps": tour.steps}
    run.say(about, "\nDemo finished; every step was verified.")


def _hand_over(run: BrokerRun, broker: "Running") -> None:
    if run.json:
        return
    keylane_here = "keylane" if shutil.which("keylane") else sys.argv[0]  # `make run` has it in a folder
    server = f"--server {broker.url}"
    lines = [
        f"\nThe broker stays at {broker.url} until Ctrl-C. In another terminal, try:",
        f"  {keylane_here} subscribe {TOPIC} mine {server}",
        f"  {keylane_here} publish {TOPIC} 'hello' --key anna {server}",
    ]
    if redis := next(filter(shutil.which, ("valkey-cli", "redis-cli")), None):
        lines.append(f"  {redis} -u {broker.redis_url} hgetall kl:topic:{TOPIC}")
    for line in lines:
        run.out.print(line, markup=False, soft_wrap=True)
