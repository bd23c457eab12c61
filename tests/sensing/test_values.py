"""Formats of strings."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sensing.values import FORMATS, formats_of


@pytest.mark.parametrize(
    ("name", "fitting", "others"),
    [
        ("date-time", ["2026-11-22T10:11:12Z", "2026-11-22t10:11:12.5+01:00"],
         ["2026-11-22 10:11:12", "2026-13-22T10:11:12Z", "2026-11-22T24:11:12Z"]),
        ("date", ["2026-11-22"], ["2026-11-32", "22.11.2026", "2026-11-22T10:11:12Z"]),
        ("time", ["10:11:12Z", "10:11:12.123-05:00"], ["10:11:12", "25:11:12Z"]),
        ("uuid", ["0192f0c1-0000-7000-8000-000000000001"], ["0192f0c1000070008000000000000001"]),
        ("email", ["a.b+c@example.org"], ["a@b", "a b@example.org", "@example.org"]),
        ("ipv4", ["10.0.0.1"], ["10.0.0.256", "10.0.0"]),
        ("ipv6", ["::1", "2001:db8::8a2e:370:7334"], ["10.0.0.1", "fe80::1%eth0", ":::"]),
        ("uri", ["https://example.org/a?b=c#d", "s3://bucket/key"], ["example.org", "http://a b"]),
    ],
)  # fmt: skip
def test_formats(name: str, fitting: list[str], others: list[str]) -> None:
    """Each format matches its strings, and not those that only look similar."""
    for text in fitting:
        assert formats_of(text, frozenset(FORMATS)) == {name}
    for text in [*others, ""]:
        assert name not in formats_of(text, frozenset(FORMATS))
