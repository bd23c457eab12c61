"""Pipeline files for the tests of this folder: a valid one, and a function that changes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

GOOD: dict[str, Any] = {
    "metadata": {"name": "orders", "tenant": "acme"},
    "spec": {
        "source": {
            "type": "postgres",
            "config": {
                "id": "pg",
                "dsn": "postgres://u:geheim@localhost/app",
                "slot": "orders",
                "publication": "orders",
                "tables": ["public.orders"],
            },
        },
        "sinks": [
            {
                "type": "redis",
                "config": {"id": "cache", "uri": "redis://:geheim@localhost", "stream": "orders"},
            },
            {"type": "file", "config": {"id": "lines", "path": "/tmp/${source.table}.jsonl"}},
        ],
    },
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a valid pipeline file with some changes.

    `write({"spec.sinks.0.config.id": "x", "metadata.tenant": None})` sets the first field and
    removes the second; `file` is the file's name.
    """

    def _write(changes: dict[str, Any] | None = None, *, file: str = "orders.yaml") -> Path:
        document = copy.deepcopy(GOOD)
        for place, value in (changes or {}).items():
            *parents, last = place.split(".")
            block: Any = document
            for part in parents:
                block = block[int(part)] if isinstance(block, list) else block.setdefault(part, {})
            if value is None:
                del block[last]
            else:
                block[int(last) if isinstance(block, list) else last] = value
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    return _write
