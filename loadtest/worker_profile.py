"""Where a worker's time goes: `python -m loadtest.worker_profile` loads one that runs under cProfile.

The profiler makes Python's own functions look dearer than they are, and leaves system calls as they are.
"""

import json
import pstats
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import typer

from keylane import Client
from keylane.types import Mode
from keylane_broker.config import Settings
from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import Server
from loadtest.players import Order, Player, consume, produce

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def profiled_worker(redis_url: str, port: int, profile: Path) -> Iterator[None]:
    """A worker process that writes a profile when it stops."""
    program = (
        "import cProfile, sys\n"
        "from keylane_broker.process import __main__ as worker_process\n"
        "path, profile = sys.argv.pop(), cProfile.Profile()\n"
        "profile.runcall(worker_process.main)\n"
        "profile.dump_stats(path)\n"
    )
    order = {
        "settings": Settings(port=port, log_level="warning").model_dump(mode="json"),
        "redis_url": redis_url,
        "worker_id": "profiled",
    }
    with subprocess.Popen(
        [sys.executable, "-c", program, str(profile)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()
        worker.stdout.readline()
        yield
        worker.send_signal(signal.SIGTERM)
        worker.wait(20)


def main(
    messages: int = 200_000,
    mode: str = "shared",
    partitions: int = 1,
    batch: int = 500,
    rate: float = 0.0,
    lines: int = 16,
) -> None:
    """Run messages through the worker, as fast as possible or at a rate, and print the dearest functions."""
    port = free_port()
    order = Order("profile", messages, partitions, batch, mode=cast(Mode, mode), rate=rate)
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        profile = Path(folder) / "profile"
        with profiled_worker(server.url, port, profile):
            url = f"keylane://127.0.0.1:{port}"
            with Client(url) as client:
                client.create_topic(order.name, partitions=partitions)
            with Player(produce, url) as producer, Player(consume, url) as consumer:
                consumer.tell(order)
                consumer.expect("listening")
                producer.tell(order)
                took = consumer.report().ended - producer.report().began
        print(f"{messages / took:,.0f} messages/s under the profiler")
        show(profile, messages, lines)


def show(profile: Path, messages: int, lines: int) -> None:
    """The functions that take most time themselves, as microseconds and calls per message."""
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    own = {where: row[1:3] for where, row in stats.items() if where[2] not in ("serve", "run")}
    total = sum(seconds for _, seconds in own.values())
    print(f"{'us/message':>10}  {'share':>5}  {'calls':>6}  function")
    for where, (calls, seconds) in sorted(own.items(), key=lambda item: -item[1][1])[:lines]:
        file, _, name = where
        place = "" if file.startswith("~") else f"{Path(file).parent.name}/{Path(file).name} "
        figures = f"{seconds / messages * 1e6:10.3f}  {seconds / total:5.0%}  {calls / messages:6.2f}"
        print(f"{figures}  {place}{name}")


if __name__ == "__main__":
    typer.run(main)
