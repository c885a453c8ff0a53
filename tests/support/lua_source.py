"""A look at a Lua file as text: the names that it declares, offers, uses and assigns."""

import re
from functools import cache

KEYWORDS = {
    *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil"),
    *("not", "or", "repeat", "return", "then", "true", "until", "while"),
}
GLOBALS = {
    *("KEYS", "ARGV", "redis", "cmsgpack", "cjson", "string", "table", "math", "unpack", "type", "tonumber"),
    "pcall",
    *("ipairs", "pairs"),
}


@cache
def _code(source: str) -> str:
    """Return the file without comments, texts, fields and keys of tables."""
    code = re.sub(r"'(?:\\.|[^'\\\n])*'|--[^\n]*", lambda found: "''" if found[0][0] == "'" else "", source)
    code = re.sub(r"(?<!\.)\.\s*[A-Za-z_]\w*", "", code)
    depth, pieces = 0, []
    for piece in re.findall(r"[{,]\s*[A-Za-z_]\w*(?= = )|\W|\w+", code):
        depth += piece.startswith("{")
        pieces.append(piece[0] if depth and len(piece) > 1 and piece[0] in "{," else piece)
        depth -= piece == "}"
    return "".join(pieces)


def _names(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text)) - KEYWORDS


def declared(source: str) -> set[str]:
    """Return every name that the file declares anywhere: locals, functions, parameters, loop variables."""
    code = _code(source)
    found = set(re.findall(r"\blocal function (\w+)", code))
    for pattern in (
        r"\bfunction\s*\w*\(([^)]*)\)",
        r"\blocal ((?!function)[\w, ]+)",
        r"\bfor ([\w, ]+?) (?:in|=)",
    ):
        for names in re.findall(pattern, code):
            found |= _names(names)
    return found


def offered(source: str) -> set[str]:
    """Return the names that the file declares for whatever comes behind it."""
    code = _code(source)
    found = set(re.findall(r"^local function (\w+)", code, re.MULTILINE))
    for names in re.findall(r"^local ((?!function)[\w, ]+)", code, re.MULTILINE):
        found |= _names(names)
    return found


def used(source: str) -> set[str]:
    """Return the names that the file uses and does not declare."""
    return _names(re.sub(r"\b\d\w*", "", _code(source))) - declared(source) - GLOBALS


def assigned(source: str) -> set[str]:
    """Return the names that the file gives another value and does not declare."""
    found: set[str] = set()
    for names in re.findall(r"^\s*([A-Za-z_][\w, ]*?) = ", _code(source), re.MULTILINE):
        if not names.startswith("local "):
            found |= _names(names)
    return found - declared(source)
