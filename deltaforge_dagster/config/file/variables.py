"""Which environment variables a block of a pipeline file takes its values from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.file.document import parse

_MARKED = re.compile("\ue000(\\w+)\ue001")
"""The name of a variable between two characters of private use."""


def variables_of(path: Path, sink: str | None) -> list[str]:
    """Return the names of the set environment variables that the source, or a sink, uses.

    The list is empty if the file cannot be read. Sinks without an id cannot be told apart, so the
    variables of all of them are returned.

    Args:
        path: The pipeline file.
        sink: Id of the sink; None for the source.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return []
    marked, _ = expand(text, {name: f"\ue000{name}\ue001" for name in os.environ})
    document = parse(marked).value
    spec = document.get("spec") if isinstance(document, dict) else None
    if not isinstance(spec, dict):
        return []
    blocks = [spec.get("source")] if sink is None else _sinks(spec.get("sinks"), sink)
    return sorted(set(_MARKED.findall(json.dumps(blocks, ensure_ascii=False, default=str))))


def _sinks(sinks: Any, sink: str) -> list[Any]:
    configs = [block.get("config") for block in sinks if isinstance(block, dict)] if sinks else []
    return [
        config for config in configs if isinstance(config, dict) and config.get("id", sink) == sink
    ]
