"""What a request has to pass: rate, origin, token, size."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from deltaforge_dagster.api.guard import Limits, Rate, is_loopback
from tests.api.conftest import Api, document


def test_loopback() -> None:
    """Names and addresses of this machine alone."""
    for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LocalHost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""):
        assert not is_loopback(host), host


def test_a_token_is_asked_for(serve: Callable[..., Api]) -> None:
    """Everywhere but where it is only said that the process is alive."""
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
    """A page elsewhere can neither send requests nor let its own name point here."""
    url = str(api.client.base_url)
    for headers in (
        {"Host": "attacker.example"},
        {"Host": "[half"},
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
    ):
        answer = api.client.post("/pipelines", json=document("orders"), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), headers
    assert api.store.stored_specs() == []
    assert api.client.get("/pipelines", headers={"Origin": url}).status_code == 200
    assert api.client.get("/pipelines", headers={"Host": "localhost:8080"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(serve: Callable[..., Api], chunked: bool) -> None:
    """Whether it says its size or not; one of just that size passes."""
    api = serve(limits=Limits(body_bytes=1000, requests_per_second=1e6))

    def validate(size: int) -> httpx.Response:
        body = b" " * size
        return api.client.post(
            "/validate", content=iter([body[:500], body[500:]]) if chunked else body
        )

    assert validate(1000).json()["code"] == "INVALID_REQUEST"
    answer = validate(1001)
    assert (answer.status_code, answer.json()["code"]) == (413, "REQUEST_TOO_LARGE")


def test_too_many_requests_are_refused(serve: Callable[..., Api]) -> None:
    """With the time to wait; wrong tokens count, so nobody tries many."""
    api = serve("token", Limits(requests_per_second=0.001))
    assert api.client.get("/pipelines").status_code == 401
    answer = api.client.get("/pipelines", headers=bearer("token"))
    assert (answer.status_code, answer.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert answer.headers["retry-after"] == "1"


def test_probes_have_no_rate(serve: Callable[..., Api]) -> None:
    """An orchestrator asks as often as it likes; a wrong token counts there, too."""
    slow = Limits(requests_per_second=0.001)
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
    assert api.client.get("/readyz", headers=bearer("token")).status_code == 429  # or it would tell
    assert api.client.get("/healthz").status_code == 200


def test_a_rate_is_one_of_time() -> None:
    """An address may send some at once, then as many as time allows; others are not touched."""
    now = 0.0
    rate = Rate(2.0, lambda: now)
    assert [rate.allows("a") for _ in range(9)] == [True] * 8 + [False]
    assert rate.allows("b")
    now = 1.0
    assert [rate.allows("a") for _ in range(3)] == [True, True, False]
    now = 1000.0
    assert [rate.allows("a") for _ in range(9)] == [True] * 8 + [False]


def test_the_memory_of_addresses_is_bounded() -> None:
    """However many there are; the one that was silent longest is forgotten."""
    rate = Rate(0.25, lambda: 0.0)
    assert rate.allows("first")
    assert not rate.allows("first")
    for number in range(1024):
        assert rate.allows(str(number))
    assert rate.allows("first")
    assert len(rate._buckets) == 1024
