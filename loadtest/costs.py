"""Where the time goes: `python -m loadtest.costs` prints, per step, what the script and what Python costs.

The script's share is what the server says of EVALSHA, Python's is the CPU time of this process; both in
microseconds per message, batches of 100, medians.
"""

import resource
import statistics
from collections.abc import Awaitable

import uvloop

from keylane_broker.engine.engine import Engine
from keylane_broker.supervise.embedded_server import Server
from loadtest.engine_bench import BATCH, Lane, T, messages

ROUNDS = 400
Costs = dict[str, list[tuple[float, float]]]  # step -> script and Python, per message


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _script_seconds(engine: Engine) -> float:
    stats = await engine.store.command("INFO", "commandstats")
    calls = (stats.get(f"cmdstat_{name}") for name in ("evalsha", "fcall"))
    return sum(float(call["usec"]) for call in calls if call) / 1e6


async def _timed(costs: Costs, engine: Engine, step: str, work: Awaitable[T]) -> T:
    script, cpu = await _script_seconds(engine), _cpu()
    answer = await work
    cpu = _cpu() - cpu
    script = await _script_seconds(engine) - script
    costs.setdefault(step, []).append((script / BATCH * 1e6, cpu / BATCH * 1e6))
    return answer


async def measure(url: str, mode: str) -> Costs:
    """Publish, fetch and ack batch after batch, each looked at by itself."""
    engine = Engine.connect(url)
    lane = await Lane.make(engine, f"costs-{mode}", mode)
    costs: Costs = {}
    for _ in range(ROUNDS):
        await _timed(costs, engine, "publish", lane.publish(messages(BATCH)))
        receipts = await _timed(costs, engine, "fetch", lane.fetch())
        await _timed(costs, engine, "ack", lane.ack(receipts))
    await engine.close()
    return costs


def main() -> None:
    """Print the table as Markdown."""
    modes = ("shared", "key_shared")
    with Server() as server:
        found = {mode: uvloop.run(measure(server.url, mode)) for mode in modes}
    print("| step | script, shared | Python, shared | script, key-shared | Python, key-shared |")
    print("|---|---:|---:|---:|---:|")
    for step in ("publish", "fetch", "ack"):
        cells = [
            statistics.median(pair[part] for pair in found[mode][step]) for mode in modes for part in (0, 1)
        ]
        print(f"| {step} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
