"""The wheel, in an environment of its own, beside modules of a user's with names that are as good as any."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import DEADLINE, plain_signals
from tests.support.running import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGES = {"keylane", "keylane_broker", "keylane_spark", "pyspark_keylane"}
OURS = "raise RuntimeError('this is a module of the application')\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that this tree makes."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without Hatchling in this environment pip brings it from where it has brought everything else.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *isolation,
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=DEADLINE)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; what that needs is found where this environment has it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    before = sysconfig.get_path("purelib")
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A path in such a file is searched last, and files like it there count for nothing: not ours, which
    # would bring the tree.
    (Path(packages) / "dependencies.pth").write_text(f"{before}\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-index", "--no-deps", str(wheel)], check=True, timeout=DEADLINE)
    return folder


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """The folder of an application that has names of its own."""
    (tmp_path / "broker").mkdir()
    for name in ("client.py", "broker/__init__.py", "lua.py", "pipeline.py", "server.py", "wire.py"):
        (tmp_path / name).write_text(OURS)
    return tmp_path


def test_nothing_lands_among_the_users_packages_but_what_is_named_after_us(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    version = importlib.metadata.version("keylane")
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"keylane-{version}.dist-info"}


def test_every_script_is_inside_the_brokers_package(wheel: Path) -> None:
    shipped = {name.removeprefix("keylane_broker/lua/") for name in zipfile.ZipFile(wheel).namelist()}
    scripts = {str(file.relative_to(ROOT / "lua")) for file in (ROOT / "lua").rglob("*.lua")}
    assert scripts
    assert scripts <= shipped


def test_the_readme_works_beside_modules_of_the_same_names(environment: Path, application: Path) -> None:
    """A broker by `keylane serve`, the first commands, and both programs."""
    bin = environment / "bin"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    serve = [str(bin / "keylane"), "serve", "--json", "--port", "0", "--data-dir", "data"]
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    (keylane .*)$", readme, re.M)]
    first = ("topic", "subscription", "publish", "subscribe")
    commands = [words for words in lines if words[1] in first][:4]
    assert [words[1] for words in commands] == list(first)
    with subprocess.Popen(
        serve, cwd=application, env=clean, stdout=subprocess.PIPE, text=True, preexec_fn=plain_signals
    ) as broker:
        assert broker.stdout is not None
        url = json.loads(broker.stdout.readline())["address"]
        clean["KEYLANE_SERVER"] = url

        def run(*command: str | Path) -> str:
            return subprocess.run(
                command, cwd=application, env=clean, check=True, timeout=DEADLINE, stdout=subprocess.PIPE
            ).stdout.decode()

        where = run(
            bin / "python", "-c", "import keylane, keylane_broker.store.scripts as s; print(s.__file__)"
        )
        assert Path(where.strip()).is_relative_to(environment), "the wheel's, not the tree's"
        shown = [run(bin / words[0], *words[1:]) for words in commands]
        assert "42 apples" in shown[-1]
        for number, program in enumerate(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)):
            file = application / f"example_{number}.py"
            file.write_text(program.replace("keylane://127.0.0.1:9999", url))
            shown.append(run(bin / "python", file))
        broker.send_signal(signal.SIGINT)
        assert broker.wait(DEADLINE) == 0
    assert "42 apples" in shown[-2]
    assert "7 euros" in shown[-1]
