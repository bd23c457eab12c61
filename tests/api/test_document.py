"""Tests of the API against its own OpenAPI document with generated requests."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.conftest import Api
from tests.chance import examples

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]

SERVERS_FAULT = {"NOT_ENABLED", "UNAVAILABLE", "BUILD_FAILED"}
"""Error codes with a status of 500 or above that are not defects."""

EXAMPLES = settings(
    max_examples=examples(4),  # of each route
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_every_route_answers_as_documented(api: Api) -> None:
    """Every response has a documented status, type and shape, for existing and for generated names and bodies."""
    schema = schemathesis.openapi.from_dict(api.client.get("/openapi.json").json())
    tried = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @EXAMPLES
        @given(case=operation.as_strategy(), real=st.sampled_from([True, True, False]))
        def answers(case: Case[Any], real: bool) -> None:
            nonlocal tried
            tried += 1
            if real and "name" in case.path_parameters:
                case.path_parameters["name"] = "orders"
            if api.store.pipelines.document("orders") is None:
                api.create("orders", journal={"enabled": True})
            response = case.call(base_url=str(api.client.base_url))
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 500:
                assert response.json()["code"] in SERVERS_FAULT, response.text

        answers()
    assert tried > 80
