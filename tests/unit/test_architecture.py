"""The page about the architecture names files and layers that are there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`((?:\w+/)+[\w.]*)`", (ROOT / page).read_text("utf-8"))
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("package", ["keylane", "keylane_broker"])
def test_the_rooms_of_a_package_are_told_in_the_order_of_their_layers(package: str) -> None:
    [layers] = [item["layers"] for item in CONTRACTS if item.get("containers") == [package]]
    [root] = ROOT.glob(f"*/{package}")
    rooms = [name for layer in layers for name in re.split(r"\W+", layer) if (root / name).is_dir()]
    table = PAGE.split(f"/{package}**")[1].split("\n**")[0]
    told = [name for name in re.findall(r"^\| `(\w+)`", table, re.MULTILINE) if (root / name).is_dir()]
    assert [room for room in rooms if room in told] == told
    assert {path.name for path in root.iterdir() if (path / "__init__.py").exists()} == set(told)
