"""A program that imports all of Keylane once and then forks a process for each order: see forked.py.

It runs on its own, with nothing from tests. Orders come on file descriptor 0, a Unix socket; when that is
closed its owner is gone, and so is it. A child returns from `serve` and is an interpreter like any other from
there, with its own end, exit status and traceback.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

CHANNEL = 0
HEADER_BYTES = 8
DESCRIPTORS = 4  # stdin, stdout, stderr, and where to say what has become of the process
PROGRAMS = {
    "keylane": "keylane_broker.commandline.main",
    "worker": "keylane_broker.process.__main__",
}
OURS = ("keylane", "keylane_broker", "keylane_spark")
LAZY = ("anyio._backends._asyncio", "uvloop", "rich.table", "keylane_broker.supervise.supervisor")


def serve(channel: socket.socket) -> Callable[[], object]:
    """Fork a child for each order; returns in each child what it is to run."""
    awake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm)
    children: dict[int, int] = {}  # where to say what has become of each
    while True:
        ready, _, _ = select.select([channel.fileno(), awake], [], [])
        if awake in ready:
            os.read(awake, 4_096)
            _tell_what_became_of(children)
        if channel.fileno() in ready:
            header, descriptors, _, _ = socket.recv_fds(channel, HEADER_BYTES, DESCRIPTORS)
            if not header:
                sys.exit()
            order = json.loads(_read_exactly(channel, int.from_bytes(header, "big")))
            pid = os.fork()
            if pid == 0:
                return _become(order, descriptors[:3])
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            children[pid] = descriptors[3]
            os.write(children[pid], b"started %d\n" % pid)


def _tell_what_became_of(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know
            if os.WIFSTOPPED(status):
                os.write(children[pid], b"stopped 0\n")
            else:
                os.write(children[pid], b"ended %d\n" % os.waitstatus_to_exitcode(status))
        if not os.WIFSTOPPED(status):
            os.close(children.pop(pid))


def _become(order: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    """Turn this child into what was ordered."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(len(descriptors), 65_536)
    os.chdir(order["folder"])
    path = os.environ.get("PYTHONPATH")
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    if (changed := os.environ.get("PYTHONPATH")) != path:
        _import_anew(changed or "")
    sys.argv = order["arguments"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    main: Callable[[], object] = importlib.import_module(PROGRAMS[order["program"]]).main
    if turns := os.environ.get("TURNS"):
        _force_turns(turns)
    if step := os.environ.get("KILL_AT_STEP"):
        _kill_at_step(**json.loads(step))
    return main


def _force_turns(when: str) -> None:
    """Let workers try the scripts for the ordinary case "always", though it be in vain, or "never"."""
    slow_cases = importlib.import_module("keylane_broker.worker.slow_cases")
    servers = importlib.import_module("keylane_broker.store.servers")
    if when == "always":
        slow_cases.SlowCases.is_likely = lambda self: False
    else:
        assert when == "never"
        servers.Servers.route = lambda self, key: None


def _kill_at_step(victim: int, step: int, first: str, steps: str) -> None:
    """Kill a process, 0 for this one, at a step of a worker: a call to Redis that `steps` is found in.

    They are counted from the call on in which `first` is found; reading is none, for it leaves all as it was.
    Before and after something is deleted are two steps, since other things may be done in between. What is
    done in portions is done in small ones.
    """
    for module, name in (("outbox", "_BURIED"), ("redriving", "_BATCH"), ("purging", "STEP")):
        setattr(importlib.import_module(f"keylane_broker.engine.{module}"), name, 3)
    store = importlib.import_module("keylane_broker.store.store").Store
    run, read_all = store.run, store.read_all
    begun, left = False, step

    def count(words: str) -> None:
        nonlocal begun, left
        begun = begun or re.search(first, words) is not None
        if begun and re.search(steps, words):
            left -= 1
            if left == 0:
                os.kill(victim or os.getpid(), signal.SIGKILL)

    async def counted_run(self: object, script: str, *rest: object) -> object:
        answer = await run(self, script, *rest)
        count(script)
        return answer

    async def counted_read_all(self: object, commands: list[tuple[str, ...]]) -> object:
        words = "\n".join(" ".join(command[:2]) for command in commands if command[0] == "XDEL")
        count(words)
        answer = await read_all(self, commands)
        count(words)
        return answer

    store.run, store.read_all = counted_run, counted_read_all


def _import_anew(path: str) -> None:
    """Forget all of Keylane: there may be another one in a folder that was put in front."""
    sys.path[:0] = path.split(os.pathsep)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


def _read_exactly(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        parts.append(channel.recv(count))
        count -= len(parts[-1])
    return b"".join(parts)


if __name__ == "__main__":
    # Whoever runs the tests may have blocked these, or ignore them: children do not.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for name in (*PROGRAMS.values(), *LAZY):
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=os.dup(CHANNEL)))()
