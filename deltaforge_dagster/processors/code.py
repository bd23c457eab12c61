"""Hashes of processor chains, which tell whether two chains may produce different output.

Cheap to import: Dagster's definitions use it, and they run no processors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import orjson

from deltaforge_dagster.config import processors as config
from deltaforge_dagster.processors.python.modules import source_hash


def code_of(processors: Iterable[config.Processor]) -> dict[str, str]:
    """Return the hashes of the modules of Python functions by processor id; import nothing."""
    hashes = {
        processor.id: source_hash(processor.function, processor.path)
        for processor in processors
        if isinstance(processor, config.PythonProcessor)
    }
    return {name: digest for name, digest in hashes.items() if digest is not None}


def chain_hash(processors: Iterable[config.Processor], code: Mapping[str, str]) -> str:
    """Return a hash that differs between chains whose output for the same rows may differ."""
    blocks = [processor.model_dump(mode="json") for processor in processors]
    for block in blocks:
        if "path" in block:
            # The code's location and time limit do not affect its output.
            del block["path"], block["limits"]
    text = orjson.dumps([*blocks, code] if code else blocks)
    return hashlib.sha256(text).hexdigest()
