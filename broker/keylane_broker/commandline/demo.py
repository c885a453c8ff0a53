"""`keylane demo`: start a broker, take a guided tour of it, and leave it running."""

import contextlib
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
            async with _broker(data_dir) as broker:
                await _tour(run, broker.url, TOPIC, broker)
                finished = True
                if not once:
                    _hand_over(run, broker)
                    await anyio.sleep_forever()
        tasks.cancel_scope.cancel()
    if not finished:
        raise KeyboardInterrupt


@contextlib.asynccontextmanager
async def _broker(data_dir: Path | None) -> AsyncIterator["Running"]:
    from keylane_broker.config import load
    from keylane_broker.logs import start_logging
    from keylane_broker.supervise.supervisor import supervise

    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keylane-demo-")))
        settings = load(port=0, redis="", data_dir=data_dir, session=SESSION_SECONDS, log_level="warning")
        start_logging(settings.log_level)
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
    port = broker.redis_url.rpartition(":")[2].partition("/")[0]
    server = f"--server {broker.url}"
    for line in (
        f"\nThe broker stays at {broker.url} until Ctrl-C. In another terminal, try:",
        f"  keylane subscribe {TOPIC} mine {server}",
        f"  keylane publish {TOPIC} 'hello' --key anna {server}",
        f"  redis-cli -p {port} hgetall kl:topic:{TOPIC}",
    ):
        run.out.print(line, markup=False, soft_wrap=True)
