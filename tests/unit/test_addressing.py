"""For whom messages are: only a redrive says that, and whatever else looks like it stops nobody."""

import pytest

from keylane import wire
from keylane.wire import pack_about
from keylane_broker.engine.addressing import addressed_to_others
from keylane_broker.worker.publish_frames import messages_of

REDRIVEN = {"redriven.for": "billing"}


@pytest.mark.parametrize("attributes", [{}, {"region": "eu"}])
def test_who_passes_on_attributes_of_what_was_redriven_publishes_for_all(attributes: dict[str, str]) -> None:
    flat = ["k", "u", pack_about(1, "web", attributes | REDRIVEN, size=3)]
    request = wire.Publish("orders", 0, "memory")
    assert messages_of(request, memoryview(wire.pack(flat))) == [
        "k",
        "u",
        pack_about(1, "web", attributes, size=3),
    ]


def test_what_was_redriven_is_passed_by_others() -> None:
    abouts = [f"1 {pack_about(1, '', said)}" for said in ({}, REDRIVEN)]
    assert addressed_to_others("billing", abouts) == []
    assert addressed_to_others("shipping", abouts) == [1]


@pytest.mark.parametrize(
    "about",
    ['1 1 "redriven.for":"x 3 ', '1 1  3:"redriven.for":"x ', '1 1   {"redriven.for":"x', '"redriven.for":"'],
)
def test_what_only_looks_like_it_is_for_all(about: str) -> None:
    assert addressed_to_others("billing", [about]) == []
