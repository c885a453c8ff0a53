"""How the tests hang together: what several of them need is in tests/support, or a module of their folder."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))


@cache
def imported(file: Path) -> set[str]:
    """The modules of this suite that a file imports, and the names that it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "tests"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(TESTS)))
def test_no_module_imports_a_test_module_or_a_conftest(file: Path) -> None:
    wrong = [
        name
        for name in imported(file)
        if any(part.startswith("test_") or part == "conftest" for part in name.split(".")[1:-1])
    ]
    assert wrong == []


@pytest.mark.parametrize("file", sorted((TESTS / "support").glob("*.py")), ids=lambda file: file.name)
def test_what_all_share_needs_nothing_of_a_single_folder(file: Path) -> None:
    assert [name for name in imported(file) if not name.startswith("tests.support")] == []
