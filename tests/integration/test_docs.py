"""What the documentation tells people to type does what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from broker.engine import Engine
from broker.results import Outgoing, Room, SubscriptionSettings, TopicSettings
from client.wire import pack_about

ROOT = Path(__file__).resolve().parents[2]


def test_the_python_example_of_the_readme_runs() -> None:
    """As a program of its own, from its imports to its last line."""
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1-1 customer-7 order-4711\n", "")


def test_the_demo_takes_its_tour_and_exits() -> None:
    """The command behind `make demo`."""
    command = [str(Path(sys.executable).parent / "keylane"), "demo", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the keyspace checker finds 0 problems" in done.stdout


def _redis_cli_lines() -> list[str]:
    page = (ROOT / "docs" / "keyspace.md").read_text("utf-8")
    return [line.strip() for line in page.splitlines() if line.startswith("    redis-cli ")]


def _words(line: str) -> list[str]:
    """The words that a shell would hand to redis-cli, with $'…' resolved."""
    plain = re.sub(
        r"\$'([^']*)'", lambda match: shlex.quote(match[1].encode().decode("unicode_escape")), line
    )
    return shlex.split(plain, comments=True)[1:]


async def test_every_redis_cli_line_of_the_keyspace_page_shows_something(server_url: str) -> None:
    """On a topic made to have something in every key."""
    engine = Engine.connect(server_url)
    await engine.create_topic("orders", TopicSettings(partitions=4))
    await engine.create_subscription("orders", "billing", SubscriptionSettings(mode="key_shared"))
    lease = await engine.acquire("orders", 3, "w1", ttl_ms=60_000)
    assert lease is not None
    for number in range(3):
        uid = "order-4711" if number == 0 else f"uid-{number}"
        await engine.publish(lease, [Outgoing("customer-7", uid, pack_about(1))])
    await engine.join(lease, "billing", "c1")
    fetched = await engine.fetch(lease, "billing", [Room("c1", 3)])
    last = [delivery.receipt for delivery in fetched.deliveries][-1]
    await engine.nack(lease, "billing", [last._replace(first=last.last)], delay_ms=60_000)
    mark = "1" if await engine.store.command("EXISTS", "kl:{orders:3}:marks:1") else "0"
    lines = _redis_cli_lines()
    assert len(lines) >= 15
    for line in lines:
        words = _words(line.replace("marks:0", f"marks:{mark}"))
        assert await engine.store.command(*words), line
    await engine.delete_topic("orders")
    assert await engine.store.keys_like("kl:*orders*") == set()
    await engine.close()


@pytest.mark.parametrize("page", ["README.md", "docs/keyspace.md", "docs/benchmarks.md", "CHANGELOG.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    """Relative links only; the outside is not ours to keep."""
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
