"""Whether the server does what its OpenAPI description says (schemathesis)."""

import pytest
import schemathesis
from http_server import served
from hypothesis import HealthCheck, settings
from schemathesis import checks

from gearbx_mlx.serving.app import server_application
from gearbx_mlx.serving.web import Guard

pytestmark = pytest.mark.processes

OPENAPI = server_application(Guard()).openapi()

CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", log_level="CRITICAL", max_tokens=2) as client:
        yield client


def shorten(body):
    """Bodies that ask for long answers ask for short ones: the shape of an answer does not depend on its length."""
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body, dict) and isinstance(body.get(name), int) and 2 < body[name] <= 2**31:
            body[name] = 2


@schemathesis.openapi.from_dict(OPENAPI).exclude(path="/chat/completions").parametrize()
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(client, case):
    shorten(case.body)
    case.call_and_validate(base_url=client.server.where, checks=CHECKED, timeout=20)


def test_every_route_is_described():
    posts = {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    }
    gets = {"/", "/health", "/metrics", "/v1/models", "/v1/models/{model}"}
    assert {(path, *operations) for path, operations in OPENAPI["paths"].items()} == {
        *((path, "post") for path in posts),
        *((path, "get") for path in gets),
    }
