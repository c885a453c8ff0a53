"""Loads the Lua scripts: each behind the parts of lua/lib that it needs."""

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
    """Return the text of every Lua file below lua/ by its path there, without `.lua`."""
    return {
        path.relative_to(root).as_posix()[:-4]: path.read_text("utf-8")
        for folder in root.iterdir()
        if folder.is_dir()
        for path in folder.rglob("*.lua")
    }


def needs_of(source: str) -> list[str]:
    """Return the parts of lib/ that a script or a part names in its `Needs` line."""
    line = re.search(r"^-- Needs +(.+)$", source, re.MULTILINE)
    return line[1].split() if line else []


def parts_of(name: str, sources: dict[str, str]) -> list[str]:
    """Return what a script is made of: the prelude, then all parts that it or its parts need, each once and
    behind those that it needs itself."""
    ordered = ["lib/prelude"]

    def add(file: str, path: tuple[str, ...]) -> None:
        if file in path:
            raise ValueError(f"{' needs '.join([*path, file])}")
        if file not in sources:
            raise ValueError(f"{path[-1]} needs {file}, which does not exist")
        if file not in ordered:
            for part in needs_of(sources[file]):
                add(f"lib/{part}", (*path, file))
            ordered.append(file)

    add(name, ())
    return ordered


def _assemble(name: str, sources: dict[str, str], shebang: bool) -> Script:
    """Put a script together: behind the prelude and the parts of lib/ that it needs."""
    parts = [sources[part] for part in parts_of(name, sources)]
    measured = name in _TAKE_IN or name.startswith("subscription/")
    if measured:
        parts = [_BEGIN, *parts, _END]
    if shebang:
        parts.insert(0, "#!lua" if name in _NEED_MEMORY else "#!lua flags=allow-oom")
    text = "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode()).hexdigest(), measured)
