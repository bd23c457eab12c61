"""URLs that hold a user and a password: those of sources, sinks and the state store.

Parsers of URLs disagree on `@`, `/`, `?` and `#` in a password: some cut it there and take the rest for a host
or a path, which then stands in error messages. So such a URL is refused before any parser sees it.
"""

from __future__ import annotations

import re

from deltaforge_dagster.errors import SpecError

NOT_ENCODED = (
    "has `@`, `/`, `?` or `#` in its user, password or path: percent-encode them there (%40, %2F, %3F, "
    "%23)"
)
"""What is wrong with a URL that `check_encoded` refuses."""

_URL_PARTS = re.compile(r"(?s)(?:[\w.+-]+://)?([^/?#]*)([^?#]*)\??([^#]*)(.*)")
_NO_PORT = re.compile(r":(?!\d*\Z)[^:\]]*\Z")


def check_encoded(url: str) -> None:
    """Check that characters that divide a URL are percent-encoded in its user and password.

    A password that has some of them and reads like options with an address in them is not found.

    Raises:
        SpecError: They are not. The message repeats nothing of the URL.
    """
    parts = _URL_PARTS.match(url.strip())
    assert parts is not None  # it matches any text
    authority, path, query, fragment = parts.groups()
    login, at, _ = authority.rpartition("@")
    option, _, value = query.partition("=")
    # In an option an `@` may stand as it is, unless what is before the `?` is a user and half a password.
    half = not at and _NO_PORT.search(authority) is not None
    if "@" in f"{login}{path}{fragment}{option}" or (half and "@" in value):
        raise SpecError(NOT_ENCODED)
