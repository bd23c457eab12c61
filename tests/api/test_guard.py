"""Tests of the checks of each request: rate, origin, token, size."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from deltaforge_dagster.api.guard import Rate, RequestLimits, is_loopback
from tests.api.conftest import Api, document


def test_loopback() -> None:
    """Loopback names and addresses are recognized."""
    for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LocalHost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""):
        assert not is_loopback(host), host


def test_a_token_is_asked_for(serve: Callable[..., Api]) -> None:
    """Every route but the liveness probe needs the token."""
    api = serve("tökén")
    paths = api.client.get("/openapi.json", headers=bearer("tökén")).json()["paths"]
    assert len(paths) > 20
    for path, methods in paths.items():
        for method in methods:
            answer = api.client.request(method, path)
            if path == "/healthz":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "UNAUTHORIZED"
    assert api.client.get("/openapi.json").status_code == 401
    for wrong in ("töké", "tökénn", "TÖKÉN"):
        assert api.client.get("/pipelines", headers=bearer(wrong)).status_code == 401
    assert (
        api.client.get("/pipelines", headers={b"Authorization": "tökén".encode()}).status_code
        == 401
    )
    assert api.client.get("/pipelines", headers=bearer("tökén")).status_code == 200


def bearer(token: str) -> dict[bytes, bytes]:
    """Return the header with a token."""
    return {b"Authorization": f"Bearer {token}".encode()}


def test_without_a_token_other_sites_are_refused(api: Api) -> None:
    """Another site's page cannot send requests, not even with a host name that points to this machine."""
    url = str(api.client.base_url)
    for headers in (
        {"Host": "attacker.example"},
        {"Host": "[half"},
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
    ):
        answer = api.client.post("/pipelines", json=document("orders"), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), headers
    assert api.store.pipelines.documents() == []
    assert api.client.get("/pipelines", headers={"Origin": url}).status_code == 200
    assert api.client.get("/pipelines", headers={"Host": "localhost:8080"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(serve: Callable[..., Api], chunked: bool) -> None:
    """A large body is refused with or without its declared size; one of exactly the limit is accepted."""
    api = serve(limits=RequestLimits(body_bytes=1000, requests_per_second=1e6))

    def validate(size: int) -> httpx.Response:
        body = b" " * size
        return api.client.post(
            "/validate", content=iter([body[:500], body[500:]]) if chunked else body
        )

    assert validate(1000).json()["code"] == "INVALID_REQUEST"
    answer = validate(1001)
    assert (answer.status_code, answer.json()["code"]) == (413, "REQUEST_TOO_LARGE")


def test_too_many_requests_are_refused(serve: Callable[..., Api]) -> None:
    """The response has the time to wait; requests with wrong tokens count as well."""
    api = serve("token", RequestLimits(requests_per_second=0.001))
    assert api.client.get("/pipelines").status_code == 401
    answer = api.client.get("/pipelines", headers=bearer("token"))
    assert (answer.status_code, answer.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert answer.headers["retry-after"] == "1"


def test_probes_have_no_rate(serve: Callable[..., Api]) -> None:
    """Probes are not rate-limited, except requests with a wrong token."""
    slow = RequestLimits(requests_per_second=0.001)
    for token in (None, "token"):
        api = serve(token, slow)
        headers = bearer("token") if token else None
        for _ in range(3):
            for path in ("/healthz", "/readyz", "/ready"):
                assert api.client.get(path, headers=headers).status_code == 200, path
        assert api.client.get("/pipelines", headers=headers).status_code == 200
        assert api.client.get("/pipelines", headers=headers).status_code == 429
        assert api.client.get("/readyz", headers=headers).status_code == 200
    statuses = [api.client.get("/readyz", headers=bearer("guess")).status_code for _ in range(2)]
    assert statuses == [401, 429]
    # Otherwise the response would confirm a guessed token.
    assert api.client.get("/readyz", headers=bearer("token")).status_code == 429
    assert api.client.get("/healthz").status_code == 200


def test_a_rate_is_one_of_time() -> None:
    """An address may send a burst, then as many requests as the rate allows; other addresses are not affected."""
    now = 0.0
    rate = Rate(2.0, lambda: now)
    assert [rate.allows("a") for _ in range(9)] == [True] * 8 + [False]
    assert rate.allows("b")
    now = 1.0
    assert [rate.allows("a") for _ in range(3)] == [True, True, False]
    now = 1000.0
    assert [rate.allows("a") for _ in range(9)] == [True] * 8 + [False]


def test_the_memory_of_addresses_is_bounded() -> None:
    """The number of remembered addresses is limited; the least recently seen one is forgotten."""
    rate = Rate(0.25, lambda: 0.0)
    assert rate.allows("first")
    assert not rate.allows("first")
    for number in range(1024):
        assert rate.allows(str(number))
    assert rate.allows("first")
    assert len(rate._buckets) == 1024
