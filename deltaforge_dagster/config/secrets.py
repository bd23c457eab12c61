"""Keep passwords out of text for people: errors, logs, Dagster's metadata.

Connection strings are URLs or `key=value` pairs. `mask` hides the secret part of both and keeps the
rest, so that a message still names the server. In case of doubt it hides too much.

URL parsers disagree about `@`, `/`, `?` and `#` in a password: some split it there and treat the
rest as a host or a path, which then appears in error messages. So `check_encoded` rejects such a
URL of a source, a sink or the state store before any parser sees it.
"""

from __future__ import annotations

import re

from deltaforge_dagster.errors import SpecError

MASK = "***"
"""What stands in place of a secret."""

# Greedy up to the last `@` of the word: a password may itself contain `@` or `/`.
_URL_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@]*):\S*@")

# libpq quotes values with ' and escapes with \ (manual: "Keyword/Value Connection Strings").
_NAMED_SECRET = re.compile(
    r"""(?ix) \b
    ( \w*password | passwd | pwd | (?:auth_?)?token | \w*secret\w* | api_?key )
    (\s*=\s*)
    (?: '(?:[^'\\]|\\.)*' | "[^"]*" | (?:\\.|\S)+ )"""
)

# Properties of librdkafka whose values are secrets (its "CONFIGURATION.md"), and those of Java
# clients, which people copy.
SECRET_NAME = re.compile(
    r"password|passphrase|secret|token|key\.pem|jaas|oauthbearer\.config", re.IGNORECASE
)
"""Matches the names of fields whose whole value is a secret."""


def mask(text: str) -> str:
    """Return `text` with `***` for the password of every URL and for every `password=` value."""
    return _NAMED_SECRET.sub(r"\1\2***", _URL_PASSWORD.sub(r"\1:***@", text))


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
