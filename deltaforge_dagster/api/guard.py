"""The checks that a request must pass before any route handles it: rate, origin, token, size.

Health probes are not rate-limited: an orchestrator that gets 429 would stop a healthy server.

Without a token the server only listens on loopback addresses. Any page open in a browser on this
machine could still send requests. Therefore the request's Host must be a loopback name, since a
site can point its own name to 127.0.0.1, and so must its Origin, if it has one.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaforge_dagster.api.errors import body

_CLIENTS = 1024
"""How many client addresses are remembered; the least recently seen one is forgotten first."""

_BURST_SECONDS = 4.0
"""A client that was idle may send as many requests at once as the rate allows in this time."""

ALIVE_PATH = "/healthz"
"""Needs no token: the response only shows that the process is alive."""

READY_PATHS = frozenset({"/readyz", "/ready"})
"""Probes that need the token.

Requests with wrong tokens are rate-limited, so that tokens cannot be guessed.
"""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits for clients' requests.

    Attributes:
        body_bytes: Maximum size of a request body.
        requests_per_second: Average rate for one address; short bursts may exceed it.
    """

    body_bytes: int = 1 << 20
    requests_per_second: float = 100.0


DEFAULT_LIMITS = RequestLimits()


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Rate:
    """Limits the request rate of each address with a token bucket."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._max_tokens = max(1.0, per_second * _BURST_SECONDS)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def would_allow(self, address: str) -> bool:
        """Return what `allows` would return, without counting a request."""
        return self._tokens(address, self._clock()) >= 1.0

    def allows(self, address: str) -> bool:
        """Count a request; return False if the address has sent too many."""
        now = self._clock()
        tokens = self._tokens(address, now)
        self._buckets.pop(address, None)
        allowed = tokens >= 1.0
        self._buckets[address] = (tokens - allowed, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return allowed

    def _tokens(self, address: str, now: float) -> float:
        tokens, before = self._buckets.get(address, (self._max_tokens, now))
        return min(self._max_tokens, tokens + (now - before) * self._per_second)


class Guard:
    """ASGI middleware that answers requests that may not pass with an error.

    Args:
        app: The application behind it.
        token: The token that requests must carry; None if the server only listens on loopback
            addresses.
        limits: Limits for clients' requests.
    """

    def __init__(self, app: ASGIApp, token: str | None, limits: RequestLimits) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._limits = limits
        self._rate = Rate(limits.requests_per_second)
        self._guesses = Rate(limits.requests_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refused(scope)
        if refused is None:
            received = await _whole_body(receive, Headers(scope=scope), self._limits.body_bytes)
            if received is not None:
                await self._app(scope, received, send)
                return
            refused = _answer(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "REQUEST_TOO_LARGE",
                f"the request body exceeds {self._limits.body_bytes} bytes",
            )
        await refused(scope, receive, send)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        """Return the error response to a request that may not pass, None if it may."""
        headers = Headers(scope=scope)
        address = "" if scope["client"] is None else scope["client"][0]
        if not self._in_time(scope["path"], headers, address):
            answer = _answer(
                HTTPStatus.TOO_MANY_REQUESTS,
                "TOO_MANY_REQUESTS",
                "too many requests, try again later",
            )
            answer.headers["Retry-After"] = "1"
            return answer
        if self._token is None:
            return _foreign(headers)
        if scope["path"] == ALIVE_PATH or self._knows_token(headers):
            return None
        answer = _answer(
            HTTPStatus.UNAUTHORIZED,
            "UNAUTHORIZED",
            "the header `Authorization: Bearer TOKEN` is missing or has a wrong token",
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _in_time(self, path: str, headers: Headers, address: str) -> bool:
        """Count a request; return whether its address is within the rate limit."""
        if path == ALIVE_PATH:
            return True
        if path not in READY_PATHS:
            return self._rate.allows(address)
        if self._token is None:
            return True
        if self._knows_token(headers):
            return self._guesses.would_allow(address)
        return self._guesses.allows(address)

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        assert self._token is not None
        # Header values were decoded as Latin-1; a token with other characters was sent as UTF-8.
        same = hmac.compare_digest(credentials.strip().encode("latin-1"), self._token)
        return scheme.lower() == "bearer" and same


def _foreign(headers: Headers) -> JSONResponse | None:
    """Return the error response to a request that another site's page may have sent, else None."""
    if not is_loopback(_host(f"//{headers.get('host', '')}")):
        return _answer(
            HTTPStatus.FORBIDDEN,
            "FORBIDDEN",
            "without a token the Host header must be a loopback name, such as localhost",
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host(origin)):
        return _answer(HTTPStatus.FORBIDDEN, "FORBIDDEN", "requests from other sites are refused")
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _whole_body(receive: Receive, headers: Headers, most: int) -> Receive | None:
    """Read the body; return a callable that replays it, or None if it exceeds `most` bytes."""
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        return None
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        more = message.get("more_body", False)
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay


def _answer(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    return JSONResponse(body(code, message), status_code=status)
