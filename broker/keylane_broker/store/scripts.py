"""Loads the Lua scripts: each behind the parts of lua/lib that it needs."""

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from keylane_broker.store.libraries import Library, Piece, function_of, library_of, suffix

# Scripts that add to what Redis holds; every other one must work when its memory is full.
_NEED_MEMORY = {
    "topic/create",
    "partition/create",
    "partition/publish",
    "partition/delay",
    "subscription/create",
    "subscription/turn",
}

# Those that are called again and again while messages come and go; see libraries.
_OFTEN = {
    "partition/publish",
    "subscription/ack",
    "subscription/ack_whole",
    "subscription/extend",
    "subscription/fetch",
    "subscription/lease_fresh",
    "subscription/nack",
    "subscription/turn",
}

# The scripts for the ordinary case are not measured: it would be a tenth of what they take.
# Inside a script Redis's TIME stands still; what moves is the CPU time of the server, of which a script is
# all but alone the user. Redis before 7.4 does not let scripts read it: there each call counts the same.
# The keys and facts of lib/subscription stand outside of main(): functions capture them faster from there.
_BEGIN = """local cpu_time = rawget(_G, 'os') and os.clock
local begun = cpu_time and cpu_time()"""
_MAIN = "local function main()"
_END = """end
local answer = main()
answer[#answer + 1] = cpu_time and (cpu_time() - begun) * 1e6 + 0.5 or 50
return answer
"""

_SUBSCRIPTION = "lib/subscription"

_COMMENT = re.compile(r"--.*")
_WORD = re.compile(r"\w+")
_FUNCTION = re.compile(r"local function (\w+)")
_PIECES = re.compile(r"(^local function .*?^end$)", re.MULTILINE | re.DOTALL)


class Script(NamedTuple):
    """A script's text, the digest that EVALSHA knows it by, whether its answer ends in how many
    microseconds it took, and the function that does the same, "" for none."""

    text: str
    sha: str
    measured: bool
    function: str = ""


class Scripts:
    """All scripts by the name of their file, such as `subscription/fetch`."""

    def __init__(self, sources: dict[str, str] | None = None, *, shebang: bool = True) -> None:
        self.sources = read_sources() if sources is None else sources
        self._by_name = {
            name: _assemble(name, self.sources, shebang)
            for name in self.sources
            if not name.startswith("lib/")
        }
        self.library = self._make_library()

    def __getitem__(self, name: str) -> Script:
        return self._by_name[name]

    def _make_library(self) -> Library | None:
        """Make functions of those that are called often, if there are any."""
        often = sorted(_OFTEN & self._by_name.keys())
        if not often:
            return None
        library = library_of({name: _function(name, self.sources) for name in often})
        for name in often:
            self._by_name[name] = self._by_name[name]._replace(function=library.name + suffix(name))
        return library


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
            raise ValueError(" needs ".join([*path, file]))
        if file not in sources:
            raise ValueError(f"{path[-1]} needs {file}, which does not exist")
        if file not in ordered:
            for part in needs_of(sources[file]):
                add(f"lib/{part}", (*path, file))
            ordered.append(file)

    add(name, ())
    return ordered


@functools.cache
def _pieces(source: str) -> list[tuple[str, str, set[str]]]:
    """Split a file into its functions and what stands between them: name or "", text, and the words in it."""
    texts = _PIECES.split(source)
    names = [found[1] if (found := _FUNCTION.match(text)) else "" for text in texts]
    return [
        (name, text, set(_WORD.findall(_COMMENT.sub("", text))))
        for name, text in zip(names, texts, strict=True)
    ]


def _prune(sources: list[str]) -> list[list[Piece]]:
    """Split files as _pieces() does, without functions that a script never comes to.

    Each costs a call a quarter of a microsecond.
    """
    pieces = [piece for source in sources for piece in _pieces(source)]
    functions = {name: words for name, _, words in pieces if name}
    reached = {""}
    ahead = set().union(*(words for name, _, words in pieces if not name)) & functions.keys()
    while ahead:
        reached |= ahead
        ahead = set().union(*(functions[name] for name in ahead)) & functions.keys() - reached
    return [[(name, text) for name, text, _ in _pieces(source) if name in reached] for source in sources]


def _assemble(name: str, sources: dict[str, str], shebang: bool) -> Script:
    """Put a script together: behind the prelude and the parts of lib/ that it needs."""
    parts = parts_of(name, sources)
    texts = ["".join(text for _, text in pieces) for pieces in _prune([sources[part] for part in parts])]
    measured = _is_measured(parts)
    if measured:
        texts.insert(parts.index(_SUBSCRIPTION) + 1 if _SUBSCRIPTION in parts else 0, _MAIN)
        texts = [_BEGIN, *texts, _END]
    if shebang:
        texts.insert(0, "#!lua" if name in _NEED_MEMORY else "#!lua flags=allow-oom")
    text = "\n".join(texts)
    return Script(text, hashlib.sha1(text.encode()).hexdigest(), measured)


def _function(name: str, sources: dict[str, str]) -> str:
    """Return what makes a function of a script."""
    parts = parts_of(name, sources)
    pieces = _prune([sources[part] for part in parts])
    return function_of(pieces, allow_oom=name not in _NEED_MEMORY, measured=_is_measured(parts))


def _is_measured(parts: list[str]) -> bool:
    return _SUBSCRIPTION in parts or "lib/partition" in parts
