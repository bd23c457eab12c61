"""What a request has to pass before any route sees it: rate, origin, token, size.

Probes have no rate: an orchestrator that gets 429 from them would end a server that is well.

Without a token the server listens to this machine alone. A browser on it is still steered by every page
that is open there: so a request must be addressed to this machine by a loopback name (a page can let its
own name point here), and if it says which page it comes from, that must be one of ours.
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
"""How many addresses are remembered; the one that was silent longest is forgotten first."""

_BURST_SECONDS = 4.0
"""A client that was silent may send what this time allows at once."""

ALIVE_PATH = "/healthz"
"""Needs no token: it says nothing but that the process is alive."""

READY_PATHS = frozenset({"/readyz", "/ready"})
"""Probes as well, with the token. Wrong tokens are counted here, too, so that nobody tries many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for.

    Attributes:
        body_bytes: Size of a request's body.
        requests_per_second: Of one address, over some seconds.
    """

    body_bytes: int = 1 << 20
    requests_per_second: float = 100.0


DEFAULT_LIMITS = Limits()


def is_loopback(host: str) -> bool:
    """Say whether a name or address means this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Rate:
    """Counts requests of addresses, each as a bucket of tokens that fills with time."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second * _BURST_SECONDS)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def would_allow(self, address: str) -> bool:
        """Say what `allows` would, and count nothing."""
        return self._tokens(address, self._clock()) >= 1.0

    def allows(self, address: str) -> bool:
        """Count a request; False when the address has sent too many."""
        now = self._clock()
        tokens = self._tokens(address, now)
        self._buckets.pop(address, None)
        allowed = tokens >= 1.0
        self._buckets[address] = (tokens - allowed, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return allowed

    def _tokens(self, address: str, now: float) -> float:
        tokens, before = self._buckets.get(address, (self._most, now))
        return min(self._most, tokens + (now - before) * self._per_second)


class Guard:
    """ASGI middleware: answers what may not pass itself.

    Args:
        app: What comes behind it.
        token: What a client must know; None where only this machine can ask.
        limits: What a client may ask for.
    """

    def __init__(self, app: ASGIApp, token: str | None, limits: Limits) -> None:
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
                f"a request's body may have {self._limits.body_bytes} bytes",
            )
        await refused(scope, receive, send)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        """Return the answer to a request that may not pass."""
        headers = Headers(scope=scope)
        address = "" if scope["client"] is None else scope["client"][0]
        if not self._in_time(scope["path"], headers, address):
            answer = _answer(
                HTTPStatus.TOO_MANY_REQUESTS,
                "TOO_MANY_REQUESTS",
                "too many requests, ask again later",
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
            "the header `Authorization: Bearer TOKEN` is missing, or has another token",
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _in_time(self, path: str, headers: Headers, address: str) -> bool:
        """Count a request, and say whether its address has not sent too many."""
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
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self._token is not None
        # Header values are Latin-1 by now; a token beyond that was sent as UTF-8.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return scheme.lower() == "bearer" and same


def _foreign(headers: Headers) -> JSONResponse | None:
    """Return the answer to a request that another site's page may have sent."""
    if not is_loopback(_host(f"//{headers.get('host', '')}")):
        return _answer(
            HTTPStatus.FORBIDDEN,
            "FORBIDDEN",
            "without a token only this machine's own names will do",
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host(origin)):
        return _answer(HTTPStatus.FORBIDDEN, "FORBIDDEN", "requests of other sites are refused")
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _whole_body(receive: Receive, headers: Headers, most: int) -> Receive | None:
    """Return the request with its whole body read; None when that is larger than `most`."""
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
