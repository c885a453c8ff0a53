"""What a consumer that comes by HTTP holds: it is counted as it comes and goes, not anew for each request."""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from keylane_broker.http.leasing import HttpConsumer, Receipt


class Message:
    """One that notes how often somebody asks where it is of."""

    asked = 0

    def __init__(self, partition: int, entry: int) -> None:
        self.id = f"{partition}:1-{entry}"
        self.token = 1
        self._partition = partition

    @property
    def partition(self) -> int:
        Message.asked += 1
        return self._partition


async def test_what_is_held_is_not_counted_anew_by_each_request() -> None:
    offered: list[Counter[int]] = []

    def offer(held: Mapping[int, int], more: int) -> None:
        offered.append(Counter(held))

    async def settled(messages: list[Any]) -> list[Any]:
        return ["settled"] * len(messages)

    consumer: Any = SimpleNamespace(name="c", offer_permits=offer, give_back=lambda: None)
    http = HttpConsumer(consumer)
    messages: list[Any] = [Message(entry % 4, entry) for entry in range(1_000)]
    receipts: list[Receipt] = list(http._keep(messages))
    assert list(http._keep(messages[:10])) == receipts[:10]  # again
    Message.asked = 0
    for receipt in receipts[:100]:
        assert await http.settle([receipt], settled, ends=True) == ["settled"]
        assert await http.settle([receipt], settled, ends=True) == ["stale"]
    assert Message.asked <= 200
    assert offered[-1] == Counter(dict.fromkeys(range(4), 225))
    assert await http.settle(receipts, settled, ends=True) == ["stale"] * 100 + ["settled"] * 900
    assert offered[-1] == Counter()
