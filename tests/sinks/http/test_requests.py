"""What requests are made of a batch, and what a response means for the messages of its request."""

from __future__ import annotations

import datetime as dt
import email.utils
import hashlib
import json
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import AuthFailed, SinkRejected, SinkUnavailable, Undeliverable
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sinks.http.requests import (
    MOST_SECONDS,
    HttpRequest,
    HttpRequests,
    Refusal,
    RequestForm,
    judge,
    origin_of,
    retry_after,
)


def test_success() -> None:
    """Every 2xx acknowledges."""
    for status in (200, 201, 202, 204, 299):
        assert judge("s", status, [], b"") is None


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_not_now(status: int) -> None:
    """The same request may succeed later."""
    with pytest.raises(SinkUnavailable, match=rf"^s answered {status}") as caught:
        judge("s", status, [(b"Retry-After", b"7")], b"geheim")

    assert caught.value.retry_after == 7
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_credentials(status: int) -> None:
    """Somebody has to correct them."""
    with pytest.raises(AuthFailed, match="correct the credentials"):
        judge("s", status, [], b"")


@pytest.mark.parametrize(
    ("location", "place"),
    [
        (b"https://u:geheim@other/x?geheim=1", "another place on other;"),
        (b"/geheim", "another path;"),
    ],
)
def test_redirects(location: bytes, place: str) -> None:
    """They are not followed; the error says where they lead, without what the URL may hold."""
    for status in (301, 302, 303, 307, 308):
        with pytest.raises(SinkRejected, match=place) as caught:
            judge("s", status, [(b"location", location)], b"")
        assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("status", [100, 304, 600, 999])
def test_what_is_no_answer(status: int) -> None:
    """Neither success nor refusal."""
    with pytest.raises(SinkRejected, match="no answer to a delivery"):
        judge("s", status, [], b"")


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (400, "serialization"), (409, "serialization"), (422, "serialization"),
        (404, "routing"), (405, "routing"), (410, "routing"),
        (413, "too_large"), (414, "too_large"), (431, "too_large"),
    ],
)  # fmt: skip
def test_refusals(status: int, cause: str) -> None:
    """Every other 4xx concerns the message."""
    found = judge("s", status, [], b"bad\xff \n field" + b"x" * 9000)

    assert isinstance(found, Refusal)
    assert (found.status, found.cause) == (status, cause)
    assert found.detail.startswith("; it said: bad\N{REPLACEMENT CHARACTER} fieldxxx")
    assert len(found.detail) < 600
    assert Refusal(400, " ").detail == ""


def test_retry_after() -> None:
    """Seconds or a date; what has passed, or is none, says nothing; an hour at the most."""
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=90)
    date = email.utils.format_datetime(soon, usegmt=True)

    assert 85 < (retry_after(date) or 0) <= 90
    assert retry_after(" 120 ") == 120
    assert retry_after("999999999999") == MOST_SECONDS
    assert retry_after("Wed, 21 Oct 2115 07:28:00 GMT") == MOST_SECONDS
    for nothing in (None, "", "0", "-5", "1.5", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "٣"):
        assert retry_after(nothing) is None


URL = "https://h/a"
BATCH = RequestForm(batch=True)


def batch(*rows: dict[str, object], replay: str | None = None) -> SinkBatch:
    """Return a batch; each row gives what differs from a plain message."""
    full = [
        {
            "ordinal": number,
            "destination": URL,
            "key": f"k{number}",
            "value": f'{{"n":{number}}}',
            "event_id": f"e{number}",
            "idempotency_key": f"i{number}",
            **row,
        }
        for number, row in enumerate(rows)
    ]
    return SinkBatch(1, "5e9", pa.RecordBatch.from_pylist(full, schema=MESSAGES), replay)


def headers_of(request: HttpRequest) -> dict[str, str]:
    """Return the headers of a request, whose names differ."""
    found = {name.decode(): value.decode() for name, value in request.headers}
    assert len(found) == len(request.headers)
    return found


def test_a_request_for_each_message() -> None:
    """The body is the message; headers are those of the file, of the change, and the sink's."""
    form = RequestForm(headers={"Authorization": "Bearer ä", "X-Shop": "1"})
    rows = batch({"headers": '{"x-shop":"2","trace":"t 1"}'}, {"key": None})

    first, second = HttpRequests(rows, form)

    assert (first.url, first.body, second.body) == (URL, b'{"n":0}', b'{"n":1}')
    common = {"content-type": "application/json", "Authorization": "Bearer ä"}
    of_first = {"x-shop": "2", "trace": "t 1", "idempotency-key": "i0", "df-key": "k0"}
    assert headers_of(first) == {**common, **of_first}
    assert headers_of(second) == {**common, "X-Shop": "1", "idempotency-key": "i1"}


def test_a_content_type_of_its_own() -> None:
    """That of the file counts instead of the default, and that of the change instead of the file's."""
    form = RequestForm(headers={"Content-Type": "text/x"})
    first, second = HttpRequests(batch({}, {"headers": '{"CONTENT-TYPE":"text/y"}'}), form)

    assert headers_of(first)["Content-Type"] == "text/x"
    assert headers_of(second)["CONTENT-TYPE"] == "text/y"


def test_a_replay_has_other_idempotency_keys() -> None:
    """A receiver that drops what it knows must not drop a replay."""
    (single,) = HttpRequests(batch({}, replay="r1"), RequestForm())
    (many,) = HttpRequests(batch({}, {}, replay="r1"), BATCH)

    assert headers_of(single)["idempotency-key"] == "i0|replay|r1"
    assert headers_of(single)["df-replay"] == headers_of(many)["df-replay"] == "r1"
    assert headers_of(many)["idempotency-key"].endswith("|replay|r1")


def test_a_batch_names_exactly_its_messages() -> None:
    """The same messages have the same idempotency key, others another one; there is no single key."""
    three = batch({}, {}, {})
    (whole,) = HttpRequests(three, BATCH)
    (again,) = HttpRequests(three, BATCH)
    (part,) = HttpRequests(replace(three, messages=three.messages.slice(0, 2)), BATCH)

    own = headers_of(whole)["idempotency-key"]
    assert own == hashlib.sha256(b'["i0","i1","i2"]').hexdigest()
    assert own == headers_of(again)["idempotency-key"]
    assert own != headers_of(part)["idempotency-key"]
    assert "df-key" not in headers_of(whole)


def test_no_change_goes_to_the_url_of_another() -> None:
    """A request ends where URL or headers change, and begins anew where they are as before."""
    other: dict[str, object] = {"destination": "https://h/b"}
    marked: dict[str, object] = {"headers": '{"x":"1"}'}
    found = list(HttpRequests(batch({}, {}, other, {}, marked, marked), BATCH))

    assert [(one.start, one.stop, one.url[-1]) for one in found] == [
        (0, 2, "a"),
        (2, 3, "b"),
        (3, 4, "a"),
        (4, 6, "a"),
    ]


@pytest.mark.parametrize(
    ("form", "body"),
    [(BATCH, b'[{"n":0},{"n":1}]'), (replace(BATCH, array=False), b'{"n":0}\n{"n":1}\n')],
)
def test_bodies_of_batches(form: RequestForm, body: bytes) -> None:
    """A JSON array, or a line for each message."""
    (request,) = HttpRequests(batch({}, {}), form)

    assert request.body == body


@pytest.mark.parametrize(
    ("row", "what", "cause"),
    [
        ({"destination": "orders"}, "is no URL", "routing"),
        ({"destination": "ftp://h/"}, "is no URL", "routing"),
        ({"destination": "http://u:geheim@h/"}, "is no URL", "routing"),
        ({"destination": "http://%2F/"}, "is no URL", "routing"),
        ({"destination": "http://h/ä"}, "is no URL", "routing"),
        ({"destination": "http://h/a/../b"}, "is no URL", "routing"),
        ({"destination": "http://h:99999/"}, "is no URL", "routing"),
        ({"headers": '{"a b":"1"}'}, "HTTP cannot carry", "serialization"),
        ({"headers": '{"a":"1\\r\\nb: 2"}'}, "HTTP cannot carry", "serialization"),
        ({"headers": '{"a":" 1"}'}, "HTTP cannot carry", "serialization"),
        ({"headers": '{"Transfer-Encoding":"x"}'}, "sets itself", "serialization"),
        ({"headers": '{"host":"x"}'}, "sets itself", "serialization"),
        ({"headers": '{"Signed":"x"}'}, "sets itself", "serialization"),
        ({"key": "geheim\nx"}, "in its key", "serialization"),
    ],
)
def test_a_message_that_cannot_be_a_request(row: dict[str, object], what: str, cause: str) -> None:
    """Only this one is undeliverable; the error shows none of its values."""
    requests = iter(HttpRequests(batch({}, row, {}), RequestForm(signature_header="signed")))

    assert next(requests).body == b'{"n":0}'
    with pytest.raises(Undeliverable, match=what) as caught:
        next(requests)

    assert (caught.value.ordinal, caught.value.cause) == (1, cause)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("text", ["plain text", '{"a":', "1,2", "", "NaN"])
def test_text_that_would_break_an_array(text: str) -> None:
    """What is no JSON (a raw payload may be any text) is undeliverable in an array, whatever its neighbours are."""
    requests = iter(HttpRequests(batch({}, {"value": text}, {"value": "2"}), BATCH))

    assert next(requests).body == b'[{"n":0}]'
    with pytest.raises(Undeliverable, match="is no JSON") as caught:
        next(requests)
    assert caught.value.ordinal == 1


def test_json_that_orjson_rejects() -> None:
    """Half of a surrogate pair, escaped, is JSON all the same."""
    (request,) = HttpRequests(batch({"value": '"\\ud800"'}), BATCH)

    assert request.body == b'["\\ud800"]'


def test_a_line_break_in_a_line() -> None:
    """In NDJSON it would make two lines of one message."""
    requests = iter(HttpRequests(batch({}, {"value": '{\n"n":1}'}), replace(BATCH, array=False)))

    assert next(requests).body == b'{"n":0}\n'
    with pytest.raises(Undeliverable, match="line break"):
        next(requests)


def test_keys_of_requests() -> None:
    """The same key has the same number; a message without a key, or with its event id for one, is in order with all."""
    rows = batch(
        {"key": "a"}, {"key": "b"}, {"key": "a"}, {"key": None}, {"key": ""}, {"key": "e5"}
    )

    def keys(form: RequestForm) -> list[list[int] | None]:
        found = HttpRequests(rows, form)
        return [None if one.keys is None else one.keys.tolist() for one in found]

    assert keys(RequestForm(keyed=True)) == [[0], [1], [0], None, None, None]
    assert keys(RequestForm(keyed=True, row_keys=False))[:5] == [[0], [1], [0], None, None]
    assert keys(RequestForm(keyed=True, row_keys=False))[5] is not None
    assert keys(RequestForm())[0] is None


def test_a_change_with_an_identity_of_its_own() -> None:
    """The event id that counts is that of the change, where one has several messages."""
    rows = batch({"key": "e7", "event_id": "e7:1", "change_id": "e7"})
    (request,) = HttpRequests(rows, RequestForm(keyed=True))

    assert request.keys is None


def test_what_messages_show_of_a_url() -> None:
    """Neither path nor query, which may hold values of rows."""
    assert origin_of("https://h:8443/users/7?x=1") == "https://h:8443"


rows_of_changes = st.lists(
    st.tuples(
        st.integers(1, 3),  # messages of the change
        st.sampled_from(["https://h/a", "https://h/b"]),
        st.sampled_from([None, '{"x":"1"}']),
        st.integers(0, 60),  # size
    ),
    min_size=1,
    max_size=30,
)


@given(rows_of_changes, st.integers(1, 12), st.integers(1, 400), st.booleans())
def test_batches_are_cut_right(
    changes: list[tuple[int, str, str | None, int]], events: int, size: int, array: bool
) -> None:
    """Every message is in one request, in order; limits are exceeded by single changes only, which are never divided.

    The same holds for requests that are divided because they are refused.
    """
    rows: list[dict[str, object]] = []
    for ordinal, (count, url, headers, pad) in enumerate(changes):
        for part in range(count):
            value = json.dumps({"n": [ordinal, part], "pad": "ä" * pad}, ensure_ascii=False)
            common: dict[str, object] = {"ordinal": ordinal, "destination": url, "headers": headers}
            rows.append({**common, "value": value})
    form = RequestForm(batch=True, array=array, max_events=events, max_bytes=size)
    requests = HttpRequests(batch(*rows), form)

    made = list(requests)
    _check(made, rows, array=array)
    for one in made:
        held = [row["ordinal"] for row in rows[one.start : one.stop]]
        if len(set(held)) > 1:
            assert len(one.body) <= size
            assert one.stop - one.start <= events
    while any(halves := [requests.halves(one) for one in made]):
        made = [half for one, two in zip(made, halves, strict=True) for half in two or [one]]
        _check(made, rows, array=array)
    assert all(len({row["ordinal"] for row in rows[one.start : one.stop]}) == 1 for one in made)


def _check(made: list[HttpRequest], rows: list[dict[str, object]], *, array: bool) -> None:
    assert [one.start for one in made] == [0, *(one.stop for one in made[:-1])]
    assert made[-1].stop == len(rows)
    for one in made:
        held = rows[one.start : one.stop]
        texts = [str(row["value"]) for row in held]
        expected = f"[{','.join(texts)}]" if array else "".join(f"{text}\n" for text in texts)
        assert one.body.decode() == expected
        assert {row["destination"] for row in held} == {one.url}
        assert len({row["headers"] for row in held}) == 1
        if one.stop < len(rows):
            assert rows[one.stop]["ordinal"] != held[-1]["ordinal"]
