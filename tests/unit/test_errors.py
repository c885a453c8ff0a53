"""The error tree: one code for each class, the same everywhere."""

import inspect
import re

import pytest

from keylane import errors
from keylane.errors import BrokerError, DurabilityNotReached

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, BrokerError)]
RETRIABLE = {
    "BacklogFull",
    "ConnectionClosed",
    "ConnectionFailed",
    "DurabilityNotReached",
    "Fenced",
    "MessageLeased",
    "Overloaded",
    "SubscriptionBusy",
    "Unavailable",
}
PUBLIC = {
    "ConnectionFailed",
    "ConnectionClosed",
    "Overloaded",
    "Unauthorized",
    "Forbidden",
    "TopicNotFound",
    "TopicExists",
    "SubscriptionNotFound",
    "InvalidName",
    "SubscriptionExists",
    "SubscriptionBusy",
    "ConsumerReplaced",
    "SubscriptionMoved",
    "MessagesLost",
    "MessageLeased",
    "MessageNotFound",
    "InvalidArgument",
    "MessageTooLarge",
    "BacklogFull",
    "StaleReceipt",
    "PayloadMissing",
    "DurabilityNotReached",
    "IncompatibleVersion",
    "ProtocolError",
}


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_the_code_is_the_class_name_in_snake_case(error: type[BrokerError]) -> None:
    words = re.findall("[A-Z][a-z]+", error.__name__)
    assert "".join(words) == error.__name__
    assert error.code == "_".join(words).lower()


def test_codes_are_unique() -> None:
    assert len({error.code for error in CLASSES}) == len(CLASSES)


def test_the_errors_that_users_rely_on_are_there() -> None:
    assert {error.__name__ for error in CLASSES} >= PUBLIC


def test_what_trying_again_can_help_is_retriable() -> None:
    assert {error.__name__ for error in CLASSES if error.retriable} == RETRIABLE


def test_the_tree_in_the_module_s_docstring_is_the_tree_in_the_code() -> None:
    lines = re.findall(r"[├└]── (\w+)( +retriable)?", inspect.getdoc(errors) or "")
    drawn = {name: bool(retriable) for name, retriable in lines}
    assert drawn == {error.__name__: error.retriable for error in CLASSES if error is not BrokerError}


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_says_what_it_is_for(error: type[BrokerError]) -> None:
    assert (error.__doc__ or "").endswith(".")


def test_durability_not_reached_says_whether_the_message_was_stored() -> None:
    error = DurabilityNotReached("replicated was not reached", stored=True)
    assert error.stored
    assert str(error) == "replicated was not reached"
