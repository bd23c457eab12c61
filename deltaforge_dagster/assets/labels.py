"""Owners and tags of a pipeline's assets, from the metadata in its file.

An annotation or label called `owner`, `owners` or `team` is a comma-separated list of owners. An owner that is an
email address is shown as it is, any other as a team. The tenant and the labels become tags, by which the UI can
filter. Labels that Dagster does not accept as tags are left out (values may have up to 63 letters, digits, `_`,
`-`, `.`).
"""

from __future__ import annotations

import re

from deltaforge_dagster.config.model import Metadata

_NAMES = ("owner", "owners", "team")
_MAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")
_TAG_KEY = re.compile(r"([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9_.-]{0,63}")
_RESERVED = "dagster/"


def owners(metadata: Metadata) -> list[str]:
    """Return the owners of a pipeline's assets, in Dagster's format."""
    given = [
        block[name]
        for block in (metadata.annotations, metadata.labels)
        for name in _NAMES
        if name in block
    ]
    names = [name.strip() for text in given for name in text.split(",")]
    return list(dict.fromkeys(_owner(name) for name in names if name.removeprefix("team:")))


def tags(metadata: Metadata) -> dict[str, str]:
    """Return the tags of a pipeline's assets."""
    return {
        key: value
        for key, value in {**metadata.labels, "tenant": metadata.tenant}.items()
        if _TAG_KEY.fullmatch(key) and _TAG_VALUE.fullmatch(value) and not key.startswith(_RESERVED)
    }


def _owner(name: str) -> str:
    if name.startswith("team:") or _MAIL.fullmatch(name):
        return name
    return f"team:{name}"
