"""Derive the ids that a pipeline file may omit: those of its source, sinks and processors.

Ids in the file are never changed. A derived id is the same each time the file is read, and differs
from all other ids of its list. A warning names it, except where it is the default of the model.

===========  ================================================================
block        derived id
===========  ================================================================
source       the pipeline's name
sink         type and index: `redis-0`
javascript   type and index: `javascript-0`
processor    the type: `outbox`; this is the model's default, no warning
===========  ================================================================

If another block of the list has that id, `-2`, `-3` ... is appended: two outbox processors without
ids are `outbox` and `outbox-2`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from deltaforge_dagster.config.file.document import DocumentPath, DocumentProblem


def derive_ids(value: dict[str, Any], name: str | None) -> list[DocumentProblem]:
    """Add the missing ids to a document; return the warnings.

    Args:
        value: The document.
        name: The pipeline's name; None if it cannot be read.
    """
    spec = value.get("spec")
    if not isinstance(spec, dict):
        return []
    processors, sinks = spec.get("processors"), spec.get("sinks")
    warnings: list[DocumentProblem] = []
    if isinstance(processors, tuple):
        warnings += derive_processor_ids(processors, ("spec", "processors"))
    source = _config(spec.get("source"))
    if name is not None and source is not None and "id" not in source:
        source["id"] = name
        warnings.append(_missing(("spec", "source", "config"), name))
    if isinstance(sinks, tuple):
        usual = [
            f"{sink['type']}-{index}"
            if isinstance(sink, dict) and isinstance(sink.get("type"), str)
            else None
            for index, sink in enumerate(sinks)
        ]
        for index, sink_id in _derived([_config(sink) for sink in sinks], usual):
            sinks[index]["config"]["id"] = sink_id
            warnings.append(_missing(("spec", "sinks", index, "config"), sink_id))
    return warnings


def derive_processor_ids(processors: Sequence[Any], parent: DocumentPath) -> list[DocumentProblem]:
    """Add the missing ids to a list of processors, except those that are defaults of the models.

    Args:
        processors: The blocks as they are in the file.
        parent: The list's path in the document.

    Returns:
        The warnings.
    """
    blocks = [processor if isinstance(processor, dict) else None for processor in processors]
    types = [None if block is None else block.get("type") for block in blocks]
    usual = [
        f"{kind}-{index}" if kind == "javascript" else kind if isinstance(kind, str) else None
        for index, kind in enumerate(types)
    ]
    warnings = []
    for index, derived_id in _derived(blocks, usual):
        if derived_id != types[index]:
            processors[index]["id"] = derived_id
            warnings.append(_missing((*parent, index), derived_id))
    return warnings


def _derived(
    blocks: Sequence[dict[str, Any] | None], usual: Sequence[str | None]
) -> Iterator[tuple[int, str]]:
    """Yield index and derived id of each block without an id.

    `usual` has the preferred id of each block. All preferred ids that are free are assigned before
    numbered ones are chosen.
    """
    taken = {
        candidate["id"]
        for candidate in blocks
        if candidate is not None and isinstance(candidate.get("id"), str)
    }
    derived: dict[int, str] = {}
    later: list[tuple[int, str]] = []
    for index, (block, name) in enumerate(zip(blocks, usual, strict=True)):
        if block is None or name is None or "id" in block:
            continue
        if name in taken:
            later.append((index, name))
        else:
            taken.add(name)
            derived[index] = name
    for index, name in later:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        derived[index] = next(candidate for candidate in numbered if candidate not in taken)
        taken.add(derived[index])
    yield from sorted(derived.items())


def _config(block: object) -> dict[str, Any] | None:
    config = block.get("config") if isinstance(block, dict) else None
    return config if isinstance(config, dict) else None


def _missing(block: DocumentPath, name: str) -> DocumentProblem:
    return DocumentProblem((*block, "id"), f"is missing, {name} is used (give one)")
