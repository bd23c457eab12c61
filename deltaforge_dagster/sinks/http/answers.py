"""What the response to a request means for its messages (RFC 9110, "Status Codes").

==================  ================================================================================
2xx                 delivered
3xx                 the configuration is wrong: redirects are not followed, because changes would go
                    to another place than the file says
401, 403            the credentials are refused
408, 425, 429, 5xx  not now: the same request is repeated, after `Retry-After` if the response has
                    it
other 4xx           refused for good: a batch is divided, a single change is undeliverable
==================  ================================================================================
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from deltaforge_dagster.errors import AuthFailed, DeltaforgeError, SinkRejected, SinkUnavailable

MOST_SECONDS = 3600.0
"""The longest `Retry-After` that is respected; a longer one counts as this."""

_MOST_TEXT = 500
"""How many characters of a response a dead letter shows."""

_CREDENTIALS = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_TRANSIENT = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
_TOO_LARGE = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.REQUEST_URI_TOO_LONG,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
}
_WRONG_PATH = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.GONE}
_CLIENT_ERRORS = range(400, 500)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The endpoint refuses a request for good: it would refuse the same request again.

    Attributes:
        status: The status of the response.
        text: The beginning of the response.
    """

    status: int
    text: str

    def __str__(self) -> str:
        return f"status {_phrase(self.status)}"

    @property
    def cause(self) -> str:
        """The `Undeliverable.cause` of a change that is refused."""
        if self.status in _TOO_LARGE:
            return "too_large"
        return "routing" if self.status in _WRONG_PATH else "serialization"

    @property
    def detail(self) -> str:
        """The `Undeliverable.detail`: what the endpoint said, in one line."""
        text = " ".join(self.text.split())[:_MOST_TEXT]
        return f"; it said: {text}" if text else ""


def judge(
    where: str, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> Refusal | None:
    """Return None if the messages of a request are delivered, or why they never can be.

    Args:
        where: The sink and the server, for messages.
        status: The status of the response.
        headers: Its headers.
        body: The beginning of its body.

    Raises:
        SinkUnavailable: The endpoint cannot accept them now.
        AuthFailed: It refused the credentials.
        SinkRejected: It is not an endpoint for this sink.
    """
    if status // 100 == 2:
        return None
    if status in _TRANSIENT or status // 100 == 5:
        error = SinkUnavailable(f"{where} answered {_phrase(status)}")
        error.retry_after = retry_after(_header(headers, b"retry-after"))
        raise error
    if status in _CREDENTIALS:
        raise AuthFailed(
            f"{where} answered {_phrase(status)}: correct the credentials in `headers`, "
            "or those of the client in `tls`"
        )
    if status in _CLIENT_ERRORS:
        return Refusal(status, body.decode(errors="replace"))
    raise _no_endpoint(where, status, headers)


def _no_endpoint(
    where: str, status: int, headers: Sequence[tuple[bytes, bytes]]
) -> DeltaforgeError:
    location = _header(headers, b"location")
    if location is None:
        return SinkRejected(f"{where} answered {_phrase(status)}, which is no answer to a delivery")
    try:
        host = urlsplit(location).netloc.rpartition("@")[2]
    except ValueError:
        host = ""
    target = f"another place on {host}" if host else "another path"
    return SinkRejected(
        f"{where} answered {_phrase(status)}, a redirect to {target}; redirects are not followed: "
        "correct `url`"
    )


def retry_after(text: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for (RFC 9110, "Retry-After").

    Returns:
        None if there is no header, if it is invalid, or if its time is past.
    """
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        try:
            at = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = at.timestamp() - time.time()
    return min(seconds, MOST_SECONDS) if seconds > 0 else None


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next(
        (value.decode("latin-1") for name, value in headers if name.lower() == wanted), None
    )


def _phrase(status: int) -> str:
    try:
        return f"{status} ({HTTPStatus(status).phrase})"
    except ValueError:
        return str(status)
