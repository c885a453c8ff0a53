"""Loads the Lua scripts: each file of lua/ behind the preludes that it shares with its neighbours."""

import hashlib
from importlib.resources import files
from typing import NamedTuple

# Scripts that add to what Redis holds; every other one must work when its memory is full.
_NEED_MEMORY = {"topic/create", "partition/create", "partition/publish", "subscription/create"}


class Script(NamedTuple):
    """A script's text and the digest that EVALSHA knows it by."""

    text: str
    sha: str


class Scripts:
    """All scripts by the name of their file, such as `subscription/fetch`."""

    def __init__(self, sources: dict[str, str] | None = None, *, shebang: bool = True) -> None:
        self.sources = read_sources() if sources is None else sources
        self._by_name = {
            name: _assemble(name, self.sources, shebang) for name in self.sources if "/" in name
        }

    def __getitem__(self, name: str) -> Script:
        return self._by_name[name]


def read_sources() -> dict[str, str]:
    """The text of every Lua file by its path in lua/, without `.lua`."""
    root = files("lua")
    sources = {
        f"{folder}/{item.name[:-4]}": item.read_text("utf-8")
        for folder in ("topic", "partition", "subscription")
        for item in (root / folder).iterdir()
        if item.name.endswith(".lua")
    }
    for prelude in ("prelude", "lanes"):
        sources[prelude] = (root / f"{prelude}.lua").read_text("utf-8")
    return sources


def _assemble(name: str, sources: dict[str, str], shebang: bool) -> Script:
    parts = [sources["prelude"]]
    if name.startswith("subscription/"):
        parts.append(sources["lanes"])
    parts.append(sources[name])
    if shebang:
        parts.insert(0, "#!lua" + ("" if name in _NEED_MEMORY else " flags=allow-oom"))
    text = "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode()).hexdigest())
