"""What the documentation tells people to type does what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import keylane
from keylane import Client
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import (
    Capacity,
    NumberedFrame,
    Outgoing,
    SubscriptionSettings,
    TopicSettings,
    WorkerReport,
)
from keylane_broker.store.keys import OWNERS, TOKENS
from tests.support import commands
from tests.support.running import RunningBroker

ROOT = Path(__file__).resolve().parents[2]


def _lines(page: str, start: str) -> list[str]:
    """The indented lines of a page that begin with a word."""
    text = (ROOT / page).read_text("utf-8")
    return [line.strip() for line in text.splitlines() if line.startswith("    " + start)]


README = [
    "customer-7 {'region': 'eu'} b'42 apples'\n",
    "0:<ledger>-1 fsync\n0 b'7 euros'\n",
    "customer-7 {'region': 'eu'} b'42 apples'\n",
    "0:<ledger>-2 fsync\n0 b'7 euros'\n",
]
CLIENT = [
    "True\n",
    "fsync False\nTrue None\n['Published', 'InvalidArgument']\n",
    "sorted\n",
    "True\n",
    "b'a visit'\n" * 2,
] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("page", "expected"), [("README.md", README), ("docs/client.md", CLIENT)])
def test_the_python_examples_run_and_run_again(page: str, expected: list[str]) -> None:
    """As programs of their own, one after the other, on a broker with nothing in it at first."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    shown = []
    with RunningBroker() as broker:
        for example in examples * 2:
            assert "keylane://127.0.0.1:9999" in example
            program = example.replace("keylane://127.0.0.1:9999", broker.url)
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
            )
            assert (done.returncode, done.stderr) == (0, "")
            shown.append(re.sub(r"\b0:\d{13}-", "0:<ledger>-", done.stdout))
    assert shown == expected


def test_the_page_of_the_client_names_every_error_and_whether_trying_again_helps() -> None:
    rows = re.findall(r"^\| (`.*?`) \|([^|]*)\|", (ROOT / "docs/client.md").read_text("utf-8"), re.MULTILINE)
    told = {name: again for names, again in rows for name in re.findall(r"`(\w+)`", names)}
    for name, kind in vars(keylane).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, keylane.BrokerError)
            and kind is not keylane.BrokerError
        ):
            assert bool(told[name].strip()) == kind.retriable or name == "PublishFailed", name


SOME_ID = "3:1794803456029-42"
ELSEWHERE = ("keylane serve", "keylane pipeline", "keylane rebalance --plan")  # tests/pipeline has the jobs
COMMANDS = {
    page: [line for line in _lines(page, "keylane ") if not line.startswith(ELSEWHERE)]
    for page in ("README.md", "docs/operations.md")
}


@pytest.mark.slow
@pytest.mark.timeout(600)  # some fifty processes, one after the other
def test_the_commands_of_readme_and_operations_page_work() -> None:
    """In the order in which they are shown, and all of them a second time; the broker is one of our own."""
    with RunningBroker(workers=4) as broker, Client(broker.url) as client:
        for page, lines in [*COMMANDS.items()] * 2:
            assert len(lines) >= 6, page
            for line in lines:
                if SOME_ID in line:
                    line = line.replace(SOME_ID, client.publish("orders", b"").id or "")
                words = shlex.split(line, comments=True)[1:]
                done = commands.keylane(*words, KEYLANE_SERVER=broker.url)
                if line.startswith("keylane subscribe"):  # the second time the melon of the first may be due
                    assert re.search("42 apples|1 melon", done.stdout)


def _words(line: str) -> list[str]:
    """The words that a shell would hand to redis-cli, with $'…' resolved."""
    plain = re.sub(
        r"\$'([^']*)'", lambda match: shlex.quote(match[1].encode().decode("unicode_escape")), line
    )
    return shlex.split(plain, comments=True)[1:]


@pytest.mark.slow
async def test_every_redis_cli_line_of_the_keyspace_page_shows_something(server_url: str) -> None:
    """On a topic and a worker made to have something in every key."""
    engine = Engine.connect(server_url)
    await engine.enlist(WorkerReport("w1"), ttl_ms=60_000)
    await engine.lead("w1", ttl_ms=60_000)
    assert await engine.assign((await engine.owners()).version, {"orders": ["", "", "", "w1"]})
    await engine.create_topic("orders", TopicSettings(partitions=4, journal=1_000))
    parks = SubscriptionSettings(mode="key_shared", max_retries=0, poison="park")
    await engine.create_subscription("orders", "billing", parks)
    lease = await engine.acquire("orders", 3, "w1", ttl_ms=60_000)
    assert lease is not None
    for number in range(4):
        uid = "order-4711" if number == 0 else f"uid-{number}"
        await engine.publish(lease, [Outgoing("customer-7", uid, pack_about(1, size=1))])
    frames = [NumberedFrame("a-producer", 1, 1, 1)]
    await engine.publish(lease, [Outgoing("customer-8", "numbered", pack_about(1))], frames=frames)
    await engine.create_subscription("orders", "europe", SubscriptionSettings(filter=Filter("customer-*")))
    await engine.join(lease, "billing", "c1")
    fetched = await engine.fetch(lease, "billing", [Capacity("c1", 4)])
    first = fetched.deliveries[0].receipt
    for number in range(4, 200):  # one by one, which is more than the record of a lane lists
        await engine.publish(lease, [Outgoing("customer-7", f"uid-{number}", pack_about(1, size=1))])
        fetched = await engine.fetch(lease, "billing", [Capacity("c1", 1)])
    await engine.ack(lease, "billing", [first._replace(last=first.first)])
    await engine.change_topic("orders", retention_ms=60_000)
    await engine.ack(lease, "billing", [first._replace(first=first.first + 1, last=first.first + 1)])
    last = [delivery.receipt for delivery in fetched.deliveries][-1]
    await engine.nack(lease, "billing", [last._replace(first=last.last)], delay_ms=60_000)
    await engine.create_subscription("orders", "audit", SubscriptionSettings(max_retries=0))
    await engine.publish(lease, [Outgoing("customer-7", "failing", pack_about(1))])
    await engine.join(lease, "audit", "c1")
    failing = await engine.fetch(lease, "audit", [Capacity("c1", 1)])
    await engine.nack(lease, "audit", [failing.deliveries[0].receipt])
    await engine.bury("orders", 3)
    await engine.delay(lease, [Outgoing("customer-7", "later", pack_about(1))], [2**41])
    mark = "1" if await engine.store.command("EXISTS", "kl:{orders:3}:marks:1") else "0"
    await engine.store.command("HSET", TOKENS, "#own", "what workers know")
    lines = _lines("docs/keyspace.md", "redis-cli ")
    assert len(lines) >= 20
    for line in lines:
        words = _words(line.replace("marks:0", f"marks:{mark}"))
        assert await engine.store.command(*words), line
    await engine.depart("w1")
    await engine.store.command("DEL", OWNERS)
    await engine.store.command("DEL", "kl:{orders:3}:outbox")
    await engine.delete_topic("orders")
    assert await engine.store.keys_like("kl:*orders*") == set()
    await engine.close()


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    """Relative links only; the outside is not ours to keep."""
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
