"""String formats that sensing detects, by their names in JSON Schema."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping

_DATE = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def _pattern(text: str) -> Callable[[str], bool]:
    pattern = re.compile(text, re.ASCII)
    return lambda value: pattern.fullmatch(value) is not None


def _address(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> Callable[[str], bool]:
    def fits(value: str) -> bool:
        try:
            kind(value)
        except ValueError:
            return False
        return "%" not in value

    return fits


FORMATS: Mapping[str, Callable[[str], bool]] = {
    "date-time": _pattern(f"{_DATE}[Tt]{_TIME}"),
    "date": _pattern(_DATE),
    "time": _pattern(_TIME),
    "uuid": _pattern(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
    "email": _pattern(rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(?:\.{_LABEL})+"),
    "ipv4": _address(ipaddress.IPv4Address),
    "ipv6": _address(ipaddress.IPv6Address),
    "uri": _pattern(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s<>\"{}|\\^`]+"),
}
"""The test for each format."""


def formats_of(value: str, among: frozenset[str]) -> frozenset[str]:
    """Return those formats of `among` that a string matches."""
    return frozenset(name for name in among if FORMATS[name](value))
