"""Who deletes bodies that the workers cannot: a client that can, found without looking at all each time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keylane import wire
from keylane_broker.engine.bodies import BodyRecord
from keylane_broker.engine.values import Place
from keylane_broker.worker import body_deletion
from keylane_broker.worker.background import Background
from keylane_broker.worker.body_deletion import ADVERTISED, BodyDeletion
from tests.support.fake import fake_engine
from tests.support.virtual_time import in_virtual_time


class Client:
    """A client that can delete what the advertised store has."""

    store = ADVERTISED
    looks = 0  # at any of them

    def __init__(self) -> None:
        self.alive = True
        self.asked: list[int] = []

    def may_use(self, topic: str) -> bool:
        Client.looks += 1
        return True

    def uses(self, topic: str) -> bool:
        return True

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        self.asked.append(sequence)


@contextmanager
def records(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    async def read(_: object, places: list[Place], most: int) -> list[list[BodyRecord]]:
        return [[BodyRecord(f"{n}-0", ["a"], False) for n in range(count)] for _ in places]

    with monkeypatch.context() as patch:
        patch.setattr(body_deletion, "read_body_records", read)
        yield


@in_virtual_time
async def test_many_records_are_handed_to_many_clients_after_one_look_at_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = [Client() for _ in range(50)]
    bodies = BodyDeletion(
        fake_engine().store,
        "file:///nowhere",
        60.0,
        background=Background(),
        partitions=[("t", 0)],
        connections=clients,
    )
    Client.looks = 0
    with records(monkeypatch, 100):
        await bodies._work_off([("t", 0)])
    assert sum(len(client.asked) for client in clients) == 100
    assert Client.looks == 50
    busy = max(clients, key=lambda client: len(client.asked))
    busy.alive = False
    bodies.gone(busy)
    asked = len(busy.asked)
    with records(monkeypatch, 100):
        await bodies._work_off([("t", 0)])
    assert sum(len(client.asked) for client in clients) == 100 + asked
    assert len(busy.asked) == asked
    for client in clients:
        bodies.gone(client)
