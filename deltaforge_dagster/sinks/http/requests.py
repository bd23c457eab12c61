"""The requests of a batch, and what their responses mean for its messages.

By default a request holds one message. Its headers are those of the file and of the change, and::

    idempotency-key: <idempotency key of the message>
    df-key: <its key, if it has one>
    df-replay: <run of the replay, in a replay only>

In batch mode a request holds consecutive messages with the same URL and headers; it never divides
the messages of one change that share them. Its idempotency key is the SHA-256 of theirs, so it is
the same for the same messages, and it has no `df-key`. In a replay every idempotency key ends with
`|replay|<run>`, so that a receiver that drops known keys does not drop the replay.

Responses (RFC 9110, "Status Codes"):

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
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SinkBatch, whole_ordinals
from deltaforge_dagster.sinks.http.sink_type import RESERVED, TOKEN, VALUE

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

Header = tuple[bytes, bytes]

_NAME = re.compile(TOKEN)
_URL = re.compile(r"[!-~]+")
_DOT_SEGMENT = re.compile(r"/\.\.?(?:/|$)")
_MOST_CACHED = 1000
_NO_KEY = -1


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What the requests of a sink look like.

    Attributes:
        content_type: The `content-type`, unless headers have one.
        headers: Headers of every request.
        signature_header: Name of the header that the client adds, lower case.
        batch: Whether a request holds many messages.
        array: Whether the body of such a request is a JSON array, and not one message per line.
        max_events: The most messages of such a request.
        max_bytes: The largest body of such a request; only a single change may be larger.
        keyed: Whether requests need `HttpRequest.keys`, because several are under way at once.
        row_keys: Whether the key of a message is that of its row; one without such a key then has
            its event id as key.
    """

    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    signature_header: str = ""
    batch: bool = False
    array: bool = True
    max_events: int = 500
    max_bytes: int = 1 << 20
    keyed: bool = False
    row_keys: bool = True


@dataclass(slots=True)
class HttpRequest:
    """One request.

    Attributes:
        start: The first row of the batch that it holds.
        stop: The row after the last one.
        url: Where it goes.
        headers: Its headers.
        body: Its body.
        keys: Numbers of the keys of its messages; None if it must not overtake anything, or be
            overtaken.
        attempts: How often it has failed.
        not_before: Monotonic time of the next attempt.
    """

    start: int
    stop: int
    url: str
    headers: list[Header] = field(repr=False)
    body: bytes = field(repr=False)
    keys: npt.NDArray[np.int64] | None
    attempts: int = 0
    not_before: float = 0.0


class HttpRequests:
    """The requests of one batch.

    Args:
        batch: The batch.
        form: What requests look like.
    """

    def __init__(self, batch: SinkBatch, form: RequestForm) -> None:
        messages = batch.messages
        self._form = form
        self._messages = messages
        self._values = cast("pa.StringArray", messages.column("value"))
        self._ordinals = messages.column("ordinal").to_numpy()
        self._suffix = "" if batch.replay is None else f"|replay|{batch.replay}"
        self._replay = batch.replay
        self._headers: dict[str | None, dict[str, Header]] = {}
        self._urls: set[str] = set()
        self._keys = _keys(messages, form) if form.keyed else None
        if form.batch:
            self._group_ends = _group_ends(messages)
            sizes = pc.binary_length(self._values).to_numpy(zero_copy_only=False) + 1
            self._ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __iter__(self) -> Iterator[HttpRequest]:
        """Yield the requests in order.

        Raises:
            Undeliverable: A message cannot be part of a request; all before it were yielded.
        """
        start = 0
        while start < self._messages.num_rows:
            request = self._request(start, self._stop(start))
            yield request
            start = request.stop

    @property
    def key_count(self) -> int:
        """A number that is greater than all numbers in `HttpRequest.keys`."""
        return 0 if self._keys is None else self._messages.num_rows

    def ordinal(self, row: int) -> int:
        """Return the ordinal of a row."""
        return int(self._ordinals[row])

    def halves(self, request: HttpRequest) -> list[HttpRequest]:
        """Return two requests in place of one that is refused; none if it holds a single change."""
        start, stop = request.start, request.stop
        if self._ordinals[start] == self._ordinals[stop - 1]:
            return []
        middle = whole_ordinals(self._messages, start, (start + stop + 1) // 2)
        return [self._request(start, middle), self._request(middle, stop)]

    def _stop(self, start: int) -> int:
        """Return the row before which the request ends that begins with row `start`."""
        if not self._form.batch:
            return start + 1
        most = self._form.max_bytes - (1 if self._form.array else 0)
        fit = int(np.searchsorted(self._ends, self._ends[start] + most, "right")) - 1
        fit = max(start + 1, min(fit, start + self._form.max_events))
        group = int(self._group_ends[np.searchsorted(self._group_ends, start, "right")])
        return min(group, whole_ordinals(self._messages, start, fit))

    def _request(self, start: int, stop: int) -> HttpRequest:
        """Return the request of some rows, or of those before the first that cannot be part of it.

        Raises:
            Undeliverable: The first row cannot be part of a request.
        """
        body, stop = self._body(start, stop)
        return HttpRequest(
            start,
            stop,
            self._url(start),
            [*self._change_headers(start).values(), *self._sink_headers(start, stop)],
            body,
            self._keys_of(start, stop),
        )

    def _body(self, start: int, stop: int) -> tuple[bytes, int]:
        if not self._form.batch:
            return self._values[start].as_buffer().to_pybytes(), stop
        values = self._values.slice(start, stop - start)
        bad = _first_not_json(values) if self._form.array else _first_with_line_break(values)
        if bad == 0:
            problem = "is no JSON" if self._form.array else "has a line break"
            text = f"{problem}, so it cannot be part of a batch (batch_format)"
            raise self._undeliverable(start, text, "serialization")
        if bad is not None:
            values, stop = values.slice(0, bad), start + bad
        if self._form.array:
            return b"[%b]" % _joined(values, ",")[:-1], stop
        return _joined(values, "\n"), stop

    def _url(self, row: int) -> str:
        url = cast("str", self._messages.column("destination")[row].as_py())
        if url not in self._urls:
            if not _is_url(url):
                raise self._undeliverable(
                    row,
                    "has a destination that is no URL (http:// or https://, a host, special"
                    " characters percent-encoded, no `.` or `..` as part of the path)",
                    "routing",
                )
            if len(self._urls) < _MOST_CACHED:
                self._urls.add(url)
        return url

    def _change_headers(self, row: int) -> dict[str, Header]:
        """Return the headers of the file and of a change, by their names in lower case."""
        text = cast("str | None", self._messages.column("headers")[row].as_py())
        if text not in self._headers:
            headers = {"content-type": (b"content-type", self._form.content_type.encode())}
            headers |= {
                name.lower(): (name.encode(), value.encode())
                for name, value in self._form.headers.items()
            }
            for name, value in orjson.loads(text).items() if text is not None else ():
                headers[name.lower()] = self._checked_header(row, str(name), str(value))
            if len(self._headers) >= _MOST_CACHED:
                self._headers.clear()
            self._headers[text] = headers
        return self._headers[text]

    def _checked_header(self, row: int, name: str, value: str) -> Header:
        lower = name.lower()
        if not _NAME.fullmatch(name) or not VALUE.fullmatch(value):
            raise self._undeliverable(
                row,
                "has a header that HTTP cannot carry (names of letters, digits and `-`; values"
                " without control characters, and without blanks around them)",
                "serialization",
            )
        if lower in RESERVED or lower in {"host", self._form.signature_header}:
            raise self._undeliverable(
                row, f"has the header {name!r}, which the sink sets itself", "serialization"
            )
        return name.encode(), value.encode()

    def _sink_headers(self, start: int, stop: int) -> list[Header]:
        """Return the headers that the sink sets."""
        keys = self._messages.column("idempotency_key")
        headers: list[Header] = []
        if self._replay is not None:
            headers.append((b"df-replay", self._replay.encode()))
        if self._form.batch:
            names = orjson.dumps(keys.slice(start, stop - start).to_pylist())
            request_key = hashlib.sha256(names).hexdigest()
        else:
            request_key = cast("str", keys[start].as_py())
            key = cast("str | None", self._messages.column("key")[start].as_py())
            if key is not None:
                headers.append((b"df-key", self._sink_value(start, "key", key)))
        value = self._sink_value(start, "idempotency key", f"{request_key}{self._suffix}")
        return [(b"idempotency-key", value), *headers]

    def _sink_value(self, row: int, what: str, text: str) -> bytes:
        if not VALUE.fullmatch(text):
            raise self._undeliverable(
                row, f"has control characters, or blanks around it, in its {what}", "serialization"
            )
        return text.encode()

    def _keys_of(self, start: int, stop: int) -> npt.NDArray[np.int64] | None:
        if self._keys is None:
            return None
        keys = self._keys[start:stop]
        return None if (keys == _NO_KEY).any() else keys

    def _undeliverable(self, row: int, what: str, cause: str) -> Undeliverable:
        ordinal = self.ordinal(row)
        return Undeliverable(f"the message of ordinal {ordinal} {what}", ordinal, cause)


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL.

    Messages show only these, since the rest may hold values of rows.
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _group_ends(messages: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the rows before which URL or headers change, and the number of rows."""
    rows = messages.num_rows
    changes = np.zeros(rows + 1, np.bool_)
    changes[-1] = True
    for name in ("destination", "headers"):
        codes = _codes(messages.column(name))
        changes[1:-1] |= codes[1:] != codes[:-1]
    return np.flatnonzero(changes)


def _keys(messages: pa.RecordBatch, form: RequestForm) -> npt.NDArray[np.int64]:
    """Return the number of each message's key, `_NO_KEY` if it has none."""
    column = messages.column("key")
    codes = _codes(column)
    none = _null_or_equal(column, pa.scalar(""))
    if form.row_keys:
        changes = pc.coalesce(messages.column("change_id"), messages.column("event_id"))
        none |= _null_or_equal(column, changes)
    return np.where(none, _NO_KEY, codes)


def _null_or_equal(column: pa.Array[Any], other: Any) -> npt.NDArray[np.bool_]:
    """Return a mask of the texts in a column that are null, or equal to `other`."""
    differs = cast("pa.Array[Any]", pc.not_equal(column, other)).fill_null(False)
    return ~differs.to_numpy(zero_copy_only=False)


def _codes(column: pa.Array[Any]) -> npt.NDArray[np.int64]:
    """Return a number for each text: the same for the same text."""
    codes = column.dictionary_encode().indices.fill_null(_NO_KEY)
    return codes.to_numpy(zero_copy_only=False).astype(np.int64)


def _joined(values: pa.StringArray, separator: str) -> bytes:
    """Return the bytes of values, each followed by the separator."""
    joined = cast("pa.StringArray", pc.binary_join_element_wise(cast("Any", values), "", separator))
    _, ends, data = joined.buffers()
    assert ends is not None
    assert data is not None
    offsets = np.frombuffer(memoryview(ends), np.int32)[joined.offset :][: len(joined) + 1]
    return memoryview(data)[offsets[0] : offsets[-1]].tobytes()


def _first_with_line_break(values: pa.StringArray) -> int | None:
    """Return the index of the first value with a line break; events have none, raw payloads may."""
    broken = np.flatnonzero(pc.match_substring(values, "\n").to_numpy(zero_copy_only=False))
    return int(broken[0]) if len(broken) else None


def _first_not_json(values: pa.StringArray) -> int | None:
    """Return the index of the first value that is no JSON; raw payloads may be any text."""
    for index, value in enumerate(cast("list[bytes]", values.cast(pa.binary()).to_pylist())):
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError:
            if not _is_json(value):
                return index
    return None


def _is_json(value: bytes) -> bool:
    r"""Return whether a text is JSON, even with an escaped half of a surrogate pair (`\ud800`).

    orjson rejects such text.
    """
    try:
        json.loads(value, parse_constant=_refuse_constant)
    except ValueError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        valid = bool(parts.hostname) and parts.port != 0 and "%" not in parts.netloc
    except ValueError:
        return False
    return (
        valid
        and parts.scheme in {"http", "https"}
        and "@" not in parts.netloc
        and not parts.fragment
        and _URL.fullmatch(text) is not None
        and _DOT_SEGMENT.search(parts.path) is None
    )


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


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next(
        (value.decode("latin-1") for name, value in headers if name.lower() == wanted), None
    )


def _phrase(status: int) -> str:
    try:
        return f"{status} ({HTTPStatus(status).phrase})"
    except ValueError:
        return str(status)
