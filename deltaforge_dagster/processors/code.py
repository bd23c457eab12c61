"""What a chain is made of, as hashes: which chains may make different things of the same rows.

Light to import: Dagster's definitions ask for it, and run nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import orjson

from deltaforge_dagster.config import processors as config
from deltaforge_dagster.processors.modules import source_hash


def code_of(processors: Iterable[config.Processor]) -> dict[str, str]:
    """Return the hashes of the source of Python functions, by processor; nothing is imported."""
    found = {
        one.id: source_hash(one.function, one.path)
        for one in processors
        if isinstance(one, config.PythonProcessor)
    }
    return {name: one for name, one in found.items() if one is not None}


def chain_hash(processors: Iterable[config.Processor], code: Mapping[str, str]) -> str:
    """Return what tells chains apart that may make different things of the same rows."""
    blocks = [one.model_dump(mode="json") for one in processors]
    for block in blocks:
        if "path" in block:
            # Where the code lies, and how long it may take, say nothing about what it does.
            del block["path"], block["limits"]
    text = orjson.dumps([*blocks, code] if code else blocks)
    return hashlib.sha256(text).hexdigest()
