"""Loads the Lua scripts: each behind the parts of lua/lib that its header names."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

# Scripts that add to what Redis holds; every other one must work when its memory is full.
_NEED_MEMORY = {
    "topic/create",
    "partition/create",
    "partition/publish",
    "partition/delay",
    "subscription/create",
}

_TAKE_IN = {"partition/publish", "partition/delay", "partition/promote"}

# Inside a script Redis's TIME stands still; what moves is the CPU time of the server, of which a script is
# all but alone the user. Redis before 7.4 does not let scripts read it: there each call counts the same.
_BEGIN = """local cpu_time = rawget(_G, 'os') and os.clock
local begun = cpu_time and cpu_time()
local function main()"""
_END = """end
local answer = main()
answer[#answer + 1] = cpu_time and (cpu_time() - begun) * 1e6 + 0.5 or 50
return answer
"""


class Script(NamedTuple):
    """A script's text, the digest that EVALSHA knows it by, and whether its answer ends in how many
    microseconds it took."""

    text: str
    sha: str
    measured: bool


class Scripts:
    """All scripts by the name of their file, such as `subscription/fetch`."""

    def __init__(self, sources: dict[str, str] | None = None, *, shebang: bool = True) -> None:
        self.sources = read_sources() if sources is None else sources
        self._by_name = {
            name: _assemble(name, self.sources, shebang)
            for name in self.sources
            if not name.startswith("lib/")
        }

    def __getitem__(self, name: str) -> Script:
        return self._by_name[name]


FOLDER = Path(__file__).parents[1] / "lua"  # in a checkout a link to lua/ at its root


def read_sources(root: Path = FOLDER) -> dict[str, str]:
    """The text of every Lua file in every folder of lua/ by its path there, without `.lua`."""
    return {
        f"{folder.name}/{item.name[:-4]}": item.read_text("utf-8")
        for folder in root.iterdir()
        if folder.is_dir()
        for item in folder.iterdir()
        if item.name.endswith(".lua")
    }


def _assemble(name: str, sources: dict[str, str], shebang: bool) -> Script:
    """A script behind the prelude and the parts of lib/ that its `Uses` line names."""
    uses = re.search(r"^-- Uses +(.+)$", sources[name], re.MULTILINE)
    parts = [sources[f"lib/{part}"] for part in ["prelude", *(uses[1].split() if uses else [])]]
    parts.append(sources[name])
    measured = name in _TAKE_IN or name.startswith("subscription/")
    if measured:
        parts = [_BEGIN, *parts, _END]
    if shebang:
        parts.insert(0, "#!lua" if name in _NEED_MEMORY else "#!lua flags=allow-oom")
    text = "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode()).hexdigest(), measured)
