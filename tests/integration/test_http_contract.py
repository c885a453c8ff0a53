"""What /openapi.json says is what a worker does: requests made from it, against a live one."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from keylane_broker.http.app import OPERATIONS
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow


ENDLESS = {"events"}
REAL = {"topic": "0", "subscription": "0", "partition": 0, "worker": "worker-0"}
# Names of workers, messages, receipts and tokens cannot be guessed: what is said of those that there are is
# compared with the document by test_http_operations.
UNKNOWN = {
    *("move_partition", "drain_worker", "revoke_token", "create_token", "seek", "ack", "nack", "extend"),
    *("delete_message", "skip", "explain", "unpark", "move_key", "store_bodies", "sync_bodies", "get_body"),
}


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with RunningBroker(http=True) as broker:
        yield broker
        assert "Traceback" not in broker.log()


@pytest.fixture(scope="module")
def schema(broker: RunningBroker) -> Any:
    return schemathesis.openapi.from_url(f"{broker.http_urls[0]}/openapi.json")


def make_real(http: httpx.Client) -> None:
    """See to it that there is what requests may be about, with something in it, as it was at first."""
    for _ in range(2):
        made = [
            http.post(path, json=said).status_code
            for path, said in (
                ("/v1/topics", {"name": "0", "partitions": 1, "retention": 60, "exist_ok": True}),
                ("/v1/topics/0/subscriptions", {"name": "0", "exist_ok": True}),
                ("/v1/topics/0/messages", {"messages": [{"data": "1", "key": "k"}]}),
            )
        ]
        if set(made) <= {200, 201}:
            return
        http.delete("/v1/topics/0")  # a request has changed it: there may be no room for more, for example
    raise AssertionError(made)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("name", [one.name for one in OPERATIONS if one.name not in ENDLESS])
def test_no_request_is_answered_otherwise_than_documented(
    broker: RunningBroker, schema: Any, name: str, mode: GenerationMode
) -> None:
    """Neither one that the document allows nor one that it does not; the latter is never a success."""
    found = (result.ok() for result in schema.get_all_operations())
    [operation] = [one for one in found if one.definition.raw["operationId"] == name]
    if mode is GenerationMode.NEGATIVE and not operation.body and not list(operation.iter_parameters()):
        return  # there is nothing that could be wrong
    statuses = set()

    with httpx.Client(base_url=broker.http_urls[0], timeout=60) as http:

        @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
        @settings(
            max_examples=30,
            derandomize=True,  # some of them are to succeed, and always the same
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any, real: bool) -> None:
            if real and mode is GenerationMode.POSITIVE:
                make_real(http)
                for parameter in case.path_parameters or {}:
                    case.path_parameters[parameter] = REAL.get(parameter, case.path_parameters[parameter])
                if name == "lease" and isinstance(case.body, dict):
                    case.body["wait"] = 0  # not for a minute
                if name == "create_subscription" and isinstance(case.body, dict):
                    case.body["start"] = "latest"  # of all texts only few are a position
            # What a type allows may be wrong all the same: a receipt that is none, a partition that is not
            # there.
            answer = case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
            statuses.add(answer.status_code)

        check()
    if mode is GenerationMode.POSITIVE:
        assert name in UNKNOWN or statuses & {200, 201, 204, 207}, statuses
