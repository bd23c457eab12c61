"""Hiding of passwords in text that people will read: errors, logs, Dagster's metadata.

Connection strings reach this project as URLs and as `key=value` pairs. `mask` hides the secret part of
both and leaves the rest, so that a message still says which server it talks about. In doubt it
hides too much.
"""

from __future__ import annotations

import re

# Greedy up to the last `@` of the word: a password may itself contain `@` or `/`.
_URL_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@]*):\S*@")

# libpq quotes values with ' and escapes with \ (manual: "Keyword/Value Connection Strings").
_NAMED_SECRET = re.compile(
    r"""(?ix) \b
    ( \w*password | passwd | pwd | (?:auth_?)?token | \w*secret\w* | api_?key )
    (\s*=\s*)
    (?: '(?:[^'\\]|\\.)*' | "[^"]*" | (?:\\.|\S)+ )"""
)

# Properties of librdkafka whose values are secrets ("CONFIGURATION.md" of its sources), and those of
# Java clients that people copy.
SECRET_NAME = re.compile(
    r"password|passphrase|secret|token|key\.pem|jaas|oauthbearer\.config", re.IGNORECASE
)
"""Finds the names of fields whose whole value is a secret."""


def mask(text: str) -> str:
    """Return `text` with the password of every URL and every `password=` value as `***`."""
    return _NAMED_SECRET.sub(r"\1\2***", _URL_PASSWORD.sub(r"\1:***@", text))
