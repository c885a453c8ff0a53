"""The Lua files: each opens with its contract, and the loader puts them together."""

import hashlib
import re
from pathlib import Path

import pytest

from keylane_broker.store.scripts import FOLDER, Scripts, needs_of, parts_of, read_sources
from tests.support.lua_source import assigned, offered, used

SOURCES = read_sources()
SCRIPTS, BARE = Scripts(), Scripts(SOURCES, shebang=False)
NAMES = sorted(name for name in SOURCES if not name.startswith("lib/"))
PARTS = sorted(name for name in SOURCES if name.startswith("lib/"))


def header_of(source: str) -> list[str]:
    """The comment lines that a file opens with."""
    lines = source.splitlines()
    end = next(index for index, line in enumerate(lines) if not line.startswith("--"))
    return lines[:end]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_opens_with_its_contract(name: str) -> None:
    header = header_of(SOURCES[name])
    verb = name.partition("/")[2]
    assert re.match(rf"-- {verb}: \S.*[^ ]$", header[0]), header[0]
    text = "\n".join(header)
    positions = [text.find(f"\n-- {word} ") for word in ("KEYS", "ARGV", "Returns", "Cost")]
    assert -1 not in positions, "KEYS, ARGV, Returns and Cost"
    assert positions == sorted(positions)


@pytest.mark.parametrize("name", PARTS)
def test_a_shared_part_says_what_it_is_for(name: str) -> None:
    assert header_of(SOURCES[name])[0].startswith(f"-- {name.rpartition('/')[2]}: ")


@pytest.mark.parametrize("name", NAMES)
def test_every_status_that_a_script_returns_is_in_its_contract(name: str) -> None:
    source = SOURCES[name]
    header = "\n".join(header_of(source))
    returned = set(re.findall(r"return \{\s*'([A-Z_]+)'", source))
    assert "OK" in returned
    assert returned <= set(re.findall(r'\{"([A-Z_]+)"', header))


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_keys_and_arguments_are_named_at_the_top_and_each_once(name: str) -> None:
    body = SOURCES[name].splitlines()[len(header_of(SOURCES[name])) :]
    used_in = [line for line in body if re.search(r"\b(KEYS|ARGV)\[\d", line)]
    assert used_in == body[: len(used_in)], "before all else"
    assert all(line.startswith("local ") for line in used_in), used_in
    indexed = re.findall(r"\b((?:KEYS|ARGV)\[\d+\])", "\n".join(used_in))
    assert len(indexed) == len(set(indexed)), indexed


@pytest.mark.parametrize("name", PARTS)
def test_only_the_parts_that_name_the_keys_know_of_arguments(name: str) -> None:
    body = SOURCES[name].splitlines()[len(header_of(SOURCES[name])) :]
    assert name in ("lib/partition", "lib/subscription", "lib/ordinary") or not any(
        "ARGV" in line for line in body
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_is_in_the_contract_under_its_name(name: str) -> None:
    header = "\n".join(header_of(SOURCES[name]))
    arguments = re.search(r"^-- ARGV +(.*?)^-- Returns", header, re.MULTILINE | re.DOTALL)
    for line in SOURCES[name].splitlines():
        if line.startswith("local ") and "ARGV[" in line:
            names, values = line.removeprefix("local ").split(" = ", 1)
            for local, value in zip(names.split(", "), values.split(", "), strict=True):
                if number := re.search(r"ARGV\[(\d+)\]", value):
                    assert arguments
                    assert re.search(rf"\b{number[1]} +{local}\b", arguments[1]), f"{number[1]} {local}"


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_a_file_needs_the_parts_that_it_uses_and_no_others(name: str) -> None:
    source = SOURCES[name]
    needed = {part: offered(SOURCES[f"lib/{part}"]) for part in ["prelude", *needs_of(source)]}
    unknown = used(source) - set().union(*needed.values())
    assert not unknown, f"{name} uses {unknown} of parts that it does not need"
    needless = [part for part, names in needed.items() if part != "prelude" and not names & used(source)]
    assert not needless, f"{name} needs {needless} for nothing"


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_no_file_changes_a_variable_of_another(name: str) -> None:
    assert assigned(SOURCES[name]) == set()


@pytest.mark.parametrize("name", NAMES)
def test_no_name_stands_for_two_things_of_the_parts_of_a_script(name: str) -> None:
    names = [name for part in parts_of(name, SOURCES)[:-1] for name in offered(SOURCES[part])]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert not offered(SOURCES[name]) & set(names)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_does_not_end_the_script(name: str) -> None:
    function = r"^local function .*?^end$|^  \w+ = function.*?^  end$"
    outside = re.sub(function, "", SOURCES[name], flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^\s*return\b", outside, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_reads_the_time_only_through_the_prelude(name: str) -> None:
    assert "'TIME'" not in SOURCES[name]


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_a_script_makes_no_global_variables(name: str) -> None:
    lines = [line for line in SOURCES[name].splitlines() if re.match(r"function \w+\(", line)]
    assert lines == []


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_itself_behind_its_parts_and_known_by_its_digest(name: str) -> None:
    script = SCRIPTS[name]
    assert script.text.startswith("#!lua")
    assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()
    own = ("publish", "delay", "mark", "promote", "trim", "expire_messages")
    measured = name.startswith(("subscription/", "message/")) or name.rpartition("/")[2] in own
    measured = measured and name not in (
        "subscription/turn",
        "subscription/ack_whole",
        "subscription/lease_fresh",
    )
    assert script.measured is measured
    bare = BARE[name]
    assert used(bare.text) <= {"rawget", "_G", "os"}, "all that it calls is there"
    assert bare.text == script.text.partition("\n")[2]


def test_only_scripts_that_add_data_may_fail_for_want_of_memory() -> None:
    scripts = Scripts()
    refused = {name for name in NAMES if "allow-oom" not in scripts[name].text.partition("\n")[0]}
    assert refused == {
        "partition/create",
        "partition/delay",
        "partition/publish",
        "subscription/create",
        "subscription/turn",
        "topic/create",
    }


def test_a_folder_that_is_new_is_loaded_too(tmp_path: Path) -> None:
    for name in ("lib/prelude", "letters/send", "letters/sealed/open"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.lua").write_text(f"-- {name}")
    (tmp_path / "__init__.py").touch()
    (tmp_path / "letters" / "notes.txt").touch()
    assert read_sources(tmp_path) == {
        name: f"-- {name}" for name in ("lib/prelude", "letters/send", "letters/sealed/open")
    }


def lua(*needs: str) -> str:
    """A file that needs these parts."""
    return f"-- Needs   {' '.join(needs)}\n" if needs else "-- nothing\n"


def test_each_part_comes_once_behind_those_that_it_needs() -> None:
    sources = {
        "lib/prelude": lua(),
        "lib/paper": lua(),
        "lib/post/envelope": lua("paper"),
        "lib/stamp": lua("paper", "post/envelope"),
        "letters/send": lua("stamp", "paper"),
    }
    expected = ["lib/prelude", "lib/paper", "lib/post/envelope", "lib/stamp", "letters/send"]
    assert parts_of("letters/send", sources) == expected


def test_a_function_that_a_script_never_comes_to_is_left_out() -> None:
    def function(name: str, *calls: str) -> str:
        return f"local function {name}()\n  {'() '.join([*calls, ''])}\nend\n"

    sources = {
        "lib/prelude": function("write") + function("read", "write"),
        "lib/post": function("stamp", "write") + "local SEAL = 'red'\n" + function("burn", "stamp"),
        "letters/send": lua("post") + function("sign") + "stamp()\n",
    }
    text = Scripts(sources)["letters/send"].text
    assert re.findall(r"function (\w+)", text) == ["write", "stamp"]
    assert "SEAL" in text


def test_a_part_that_does_not_exist_is_an_error_when_scripts_are_loaded() -> None:
    with pytest.raises(ValueError, match="letters/send needs lib/stmap, which does not exist"):
        Scripts({"lib/prelude": lua(), "letters/send": lua("stmap")})


def test_parts_that_need_each_other_are_an_error_when_scripts_are_loaded() -> None:
    sources = {"lib/prelude": lua(), "lib/hen": lua("egg"), "lib/egg": lua("hen"), "farm/hatch": lua("egg")}
    with pytest.raises(ValueError, match="farm/hatch needs lib/egg needs lib/hen needs lib/egg"):
        Scripts(sources)


def test_every_lua_file_of_the_tree_is_loaded() -> None:
    assert set(SOURCES) == {str(path.relative_to(FOLDER))[:-4] for path in FOLDER.rglob("*.lua")}


def test_an_unknown_script_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Scripts()["partition/vanish"]
