"""Makes a library of scripts that a server keeps: what a script consists of is made once, not in each call.

What a script makes anew in each call, before it does anything, is a tenth to a third of what a call for one
message costs. A library is known by the hash of its text, so old and new workers load each their own.

Each file becomes a block, since Lua has limits: 200 local variables in one, 60 of others in a function.

    local WINDOW = 5                                 a constant is set when the library is loaded,
    local meta, name = KEYS[1], ARGV[1]              what functions know of a call by each call,
    local function close() ... meta ... end          and they are made once;
    local found = redis.call('HGET', meta, name)     what else there is to do is a step of each call

What Redis offers is looked up once, too, in the first call: when it is loaded, a library has not got it all.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

_COMMENT = re.compile(r"--.*")
_WORD = re.compile(r"\w+")
_CONSTANT = re.compile(r"^local ([A-Z][A-Z0-9_]*)( = (?:'[^'\n]*'|[\d.e]+))\n", re.MULTILINE)
_VARIABLES = re.compile(r"^local (?!function\b)(\w+(?:, \w+)*)( = )?", re.MULTILINE)

_OFFERED = "redis, cmsgpack, cjson, string, table, math, tonumber, ipairs, pairs, unpack"

# Names of our files do not begin with an underscore.
_BEGIN = f"""local _register = redis.register_function
local function _offered()
  return {_OFFERED}
end
local {_OFFERED}
local function _learn()
  {_OFFERED} = _offered()
end
"""
_LEARNT = """if not redis then
_learn()
end
"""
_ALLOW_OOM = "'allow-oom'"
_PLAIN = "local _callback = _call\n"
_MEASURED = """local function _callback(keys, arguments)
  local cpu_time = rawget(_G, 'os') and os.clock
  local begun = cpu_time and cpu_time()
  local answer = _call(keys, arguments)
  answer[#answer + 1] = cpu_time and (cpu_time() - begun) * 1e6 + 0.5 or 50
  return answer
end
"""

LIBRARIES = "keylane_"  # what their names begin with
Piece = tuple[str, str]  # of a file: a function, by its name; or under "" what stands between functions


class Library(NamedTuple):
    """What a server loads, under a name that is in its text."""

    name: str
    text: str


def library_of(functions: Mapping[str, str]) -> Library:
    """Make a library of functions, by the scripts that they stand for."""
    registered = "_register{function_name = LIBRARY .. '%s', callback = _callback, flags = _flags}"
    blocks = [f"do\n{text}{registered % suffix(script)}\nend\n" for script, text in functions.items()]
    text = _BEGIN + "".join(blocks)
    name = f"{LIBRARIES}{hashlib.sha1(text.encode()).hexdigest()[:16]}"
    return Library(name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{text}")


def suffix(script: str) -> str:
    """Return what stands behind a library's name in that of its function for a script."""
    return "_" + script.replace("/", "_")


def function_of(files: Sequence[Sequence[Piece]], *, allow_oom: bool, measured: bool) -> str:
    """Return what makes a function of the files of a script."""
    files = [[(name, _bare(text)) for name, text in pieces] for pieces in files]
    words = [set(_WORD.findall(" ".join(text for _, text in pieces))) for pieces in files]
    shared, blocks, steps = list[str](), list[str](), list[str]()
    for place, pieces in enumerate(files, start=1):
        names, block, step = _block(pieces, set().union(*words[place:]))  # nobody knows what comes behind
        if step:
            steps.append(f"_step_{place}")
            block += f"function {steps[-1]}(KEYS, ARGV)\n{step}end\n"
        shared += names
        blocks.append(f"do\n{block}end\n")
    *before, last = steps
    calls = "".join(f"{step}(keys, arguments)\n" for step in before)
    return (
        f"local {', '.join([*steps, *shared])}\n{''.join(blocks)}"
        f"local function _call(keys, arguments)\n{_LEARNT}{calls}return {last}(keys, arguments)\nend\n"
        f"{_MEASURED if measured else _PLAIN}local _flags = {{{_ALLOW_OOM if allow_oom else ''}}}\n"
    )


def _block(pieces: Sequence[Piece], elsewhere: set[str]) -> tuple[list[str], str, str]:
    """Return which names of a file other files know, what is made of it once, and its step of a call."""
    functions = [(name, text) for name, text in pieces if name]
    body = "".join(text for name, text in pieces if not name)
    constants = _CONSTANT.findall(body)
    in_functions = set(_WORD.findall(" ".join(text for _, text in functions)))
    variables: list[str] = []
    step = _VARIABLES.sub(partial(_assigned, in_functions | elsewhere, variables), _CONSTANT.sub("", body))
    lines = [f"local {name}\n" for name in variables if name not in elsewhere]
    lines += [f"{'' if name in elsewhere else 'local '}{name}{value}\n" for name, value in constants]
    lines += [text.removeprefix("local ") if name in elsewhere else text for name, text in functions]
    names = [*variables, *(name for name, _ in constants), *(name for name, _ in functions)]
    return [name for name in names if name in elsewhere], "".join(lines), step


def _assigned(known: set[str], variables: list[str], found: re.Match[str]) -> str:
    """Return how a declaration goes on where more than its step knows a variable of it: it is noted then."""
    names, value = found.groups()
    if known.isdisjoint(names.split(", ")):
        return found[0]
    variables += names.split(", ")
    return names + (value or " = nil")


def _bare(text: str) -> str:
    """Return a text without comments and empty lines."""
    lines = (line.rstrip() for line in _COMMENT.sub("", text).splitlines())
    return "".join(f"{line}\n" for line in lines if line)
