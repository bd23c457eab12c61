"""What a response means for the messages of its request."""

from __future__ import annotations

import datetime as dt
import email.utils

import pytest

from deltaforge_dagster.errors import AuthFailed, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.http.requests import MOST_SECONDS, Refusal, judge, retry_after


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
