"""Check URLs that contain a user and a password: those of sources, sinks and the state store.

URL parsers disagree about `@`, `/`, `?` and `#` in a password: some split it there and treat the
rest as a host or a path, which then appears in error messages. So such a URL is rejected before any
parser sees it.
"""

from __future__ import annotations

import re

from deltaforge_dagster.errors import SpecError

NOT_ENCODED = (
    "has `@`, `/`, `?` or `#` in its user, password or path: percent-encode them there "
    "(%40, %2F, %3F, %23)"
)
"""The message for a URL that `check_encoded` rejects."""

_URL_PARTS = re.compile(r"(?s)(?:[\w.+-]+://)?([^/?#]*)([^?#]*)\??([^#]*)(.*)")
_NO_PORT = re.compile(r":(?!\d*\Z)[^:\]]*\Z")


def check_encoded(url: str) -> None:
    """Check that the delimiters of URLs are percent-encoded in a URL's user and password.

    A password with delimiters that looks like options with an address in them is not detected.

    Raises:
        SpecError: A delimiter is not encoded. The message does not quote the URL.
    """
    parts = _URL_PARTS.match(url.strip())
    assert parts is not None  # it matches any text
    authority, path, query, fragment = parts.groups()
    login, at, _ = authority.rpartition("@")
    option, _, value = query.partition("=")
    # The value of an option may contain `@`, unless the text before the `?` is a user and half a
    # password.
    half = not at and _NO_PORT.search(authority) is not None
    if "@" in f"{login}{path}{fragment}{option}" or (half and "@" in value):
        raise SpecError(NOT_ENCODED)
