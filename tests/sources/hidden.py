"""What rows show under column rules, in plain Python, to compare the kernel with."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.sources.rows.columns import ColumnRules

SALT = "sixteen or more characters"
UNCHANGED = '{"_unchanged":true}'

_decoder = json.JSONDecoder()


def rules(**options: Any) -> ColumnRules:
    """Return the rules of a pipeline file; `hash` is a list of patterns."""
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if "hash" in options:
        options["hash"] = {"columns": options["hash"], "salt": SALT}
    return ColumnRules(ColumnOptions.model_validate(options))


def members(image: str) -> Iterator[tuple[str, str]]:
    """Yield name and JSON text of each value of an image."""
    at = 1
    while image[at] != "}":
        name, at = _decoder.raw_decode(image, at)
        _, end = _decoder.raw_decode(image, at + 1)
        end += image[end] == "\t"  # behind the document `null`
        yield name, image[at + 1 : end]
        at = end + (image[end] == ",")


def image_of(values: Mapping[str, str]) -> str:
    """Return a row's image of names and JSON texts."""
    parts = (f"{json.dumps(name, ensure_ascii=False)}:{value}" for name, value in values.items())
    return "{" + ",".join(parts) + "}"


def hashed(value: str) -> str:
    """Return what stands in place of a value that is given as JSON text."""
    if value in {"null", "null\t", UNCHANGED}:
        return value
    read = json.loads(value)
    text = read if isinstance(read, str) else value
    return f'"{hashlib.sha256((SALT + text).encode()).hexdigest()}"'


def base64_of(content: bytes) -> str:
    """Return binary data as rows have it."""
    return '{"_base64":"' + base64.b64encode(content).decode() + '"}'


def hidden_row(
    row: Mapping[str, Any], letter: str | None, *, hash_all: bool
) -> dict[str, str | None]:
    """Return `before`, `after` and `key` of a row when values are hashed, and not all are included.

    Those are whose columns' names begin with `letter`, and those of the key.
    """
    key = dict(members(row["key"])) if row["key"] else {}
    found: dict[str, str | None] = {}
    for image in ("before", "after", "key"):
        if row[image] is None:
            found[image] = None
            continue
        found[image] = image_of(
            {
                name: hashed(value) if hash_all else value
                for name, value in members(row[image])
                if letter is None or name in key or name.casefold().startswith(letter)
            }
        )
    return found
