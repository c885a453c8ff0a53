"""The public names: what API.md promises is there, and the client without await has the same words."""

import inspect

import pytest

import keylane
from keylane import AsyncClient, Client, Consumer, Message, Published, SyncConsumer, SyncMessage
from keylane.errors import BrokerError


def test_what_is_exported_is_there_and_every_error_is_exported() -> None:
    assert [name for name in keylane.__all__ if not hasattr(keylane, name)] == []
    assert keylane.__all__ == sorted(keylane.__all__)
    errors = {error.__name__ for error in BrokerError.__subclasses__()}
    assert errors <= set(keylane.__all__)


@pytest.mark.parametrize(
    ("awaited", "plain"), [(AsyncClient, Client), (Consumer, SyncConsumer), (Message, SyncMessage)]
)
def test_the_client_without_await_has_the_same_words(awaited: type, plain: type) -> None:
    def public(kind: type) -> dict[str, object]:
        return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}

    theirs, ours = public(awaited), public(plain)
    words = "check_by_hand closed error excuse give_back hand hurry offer_permits pull take"
    internal = set(words.split()) if awaited is Consumer else set()
    assert set(theirs) - internal - set(ours) == set()
    for name, method in theirs.items():
        if name in ours and inspect.isfunction(method) and name != "subscribe":
            assert parameters(method) == parameters(ours[name]), name
    if awaited is AsyncClient:
        assert list(parameters(AsyncClient.subscribe)) == list(parameters(Client.subscribe))


def parameters(method: object) -> dict[str, object]:
    assert callable(method)
    return {name: item.default for name, item in inspect.signature(method).parameters.items()}


def test_an_answer_says_what_it_is_about() -> None:
    stored = Published(3, "uid", 1, 42)
    assert (stored.id, stored.partition, stored.uid) == ("3:1-42", 3, "uid")
    assert (stored.duplicate, stored.no_subscribers, stored.durability) == (False, False, "memory")
    assert Published(3, "uid", 0, 0, no_subscribers=True).id is None


def test_names_that_are_imported_later_are_listed_and_others_are_unknown() -> None:
    assert set(keylane.__all__) <= set(dir(keylane))
    with pytest.raises(AttributeError, match="no attribute 'Asyncclient'"):
        _ = keylane.Asyncclient  # type: ignore[attr-defined]
