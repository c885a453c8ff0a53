"""What /openapi.json says is what a worker does: requests made from it, against a live one."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from keylane_broker.http.app import OPERATIONS
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow


ENDLESS = {"events"}


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    with RunningBroker(http=True) as broker:
        url = broker.http_urls[0]
        httpx.post(f"{url}/v1/topics", json={"name": "0", "partitions": 1}).raise_for_status()
        httpx.post(f"{url}/v1/topics/0/subscriptions", json={"name": "0"}).raise_for_status()
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS if one.name not in ENDLESS])
def test_no_request_is_answered_otherwise_than_documented(schema: Any, name: str) -> None:
    found = (result.ok() for result in schema.get_all_operations())
    [operation] = [one for one in found if one.definition.raw["operationId"] == name]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        # What a type allows may be wrong all the same: a receipt that is none, a partition that is not there.
        case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])

    check()
