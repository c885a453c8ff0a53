"""`keylane demo`: a broker, a guided tour of it, and then it is yours."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

from keylane_broker.commandline.command import Session, command
from keylane_broker.commandline.serve import cancel_on_signal

if TYPE_CHECKING:
    from keylane_broker.supervise.supervisor import Running

__all__ = ["add_demo"]

TOPIC = "orders"
SESSION_SECONDS = 2.0  # so that nobody waits long for what the killed consumer held


def add_demo(app: typer.Typer) -> None:
    """Make it a command."""
    command(app, "demo")(demo)


async def demo(
    session: Session,
    once: Annotated[bool, typer.Option("--once", help="Exit after the tour.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the data here; else it is thrown away.", show_default=False),
    ] = None,
) -> None:
    """Start a broker and show what it does, step by step; with --server, show it on that one."""
    import anyio

    finished = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        if session.named_server:
            await _tour(session, session.server, f"demo-{token_hex(3)}", None)
            finished = True
        else:
            async with _broker(data_dir) as broker:
                await _tour(session, broker.url, TOPIC, broker)
                finished = True
                if not once:
                    _hand_over(session, broker)
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


async def _tour(session: Session, server: str, topic: str, broker: "Running | None") -> None:
    """Show everything; on somebody else's broker nothing is left behind."""
    from keylane import AsyncClient
    from keylane.errors import TopicNotFound
    from keylane_broker.commandline.tour import Tour

    if broker and not session.json:
        session.out.print(f"A broker is up at {broker.url},\nits Valkey at {broker.redis_url}.", markup=False)
    async with AsyncClient(server) as client:
        tour = Tour(client, server, topic, session)
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
    session.say(about, "\nAll of this was real, and went as it should.")


def _hand_over(session: Session, broker: "Running") -> None:
    if session.json:
        return
    port = broker.redis_url.rpartition(":")[2].partition("/")[0]
    server = f"--server {broker.url}"
    for line in (
        f"\nThe broker stays at {broker.url} until Ctrl-C. In another terminal, try:",
        f"  keylane subscribe {TOPIC} mine {server}",
        f"  keylane publish {TOPIC} 'hello' --key anna {server}",
        f"  redis-cli -p {port} hgetall kl:topic:{TOPIC}",
    ):
        session.out.print(line, markup=False, soft_wrap=True)
