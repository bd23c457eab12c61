"""Report what a pipeline file asks for and this version does not support.

DeltaForge's files have more fields than this version reads. A field that changes what is delivered
must never be ignored silently: it is reported as a problem at its path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from deltaforge_dagster.config.blocks import bare_type
from deltaforge_dagster.config.engine import ONLY_STATE
from deltaforge_dagster.config.file.document import DocumentPath, DocumentProblem
from deltaforge_dagster.sinks.registry import broken_sink_types
from deltaforge_dagster.sources.registry import broken_source_types, no_chaser, source_types

_CHECKPOINT = ("spec", "engine", "checkpoint")
_REPLICATOR = (("checkpoint",), ("replicator", "checkpoint"), ("spec", "checkpoint"), _CHECKPOINT)
"""Paths where users may have put an event store replicator's checkpoint options, by its names."""
_REPLICATOR_FIELDS = {"checkpointAfter": "after", "instanceId": "instance_id"}
"""A replicator's names of fields, and those of `spec.engine.checkpoint`."""
_SENSING_WITHOUT_EFFECT = (
    ("tracking", "detect_drift", "drift is always detected; tables.exclude leaves tables out"),
    ("tracking", "drift_threshold", "every row that differs is counted"),
    ("output", "emit_schemas", "API, commands and Dagster show every schema"),
)


def take_unsupported(document: Any) -> list[DocumentProblem]:
    """Remove from `document` what only later versions support.

    Returns:
        A problem for each feature that the file asks for and this version lacks. The `type` of a
        sink that cannot be
        loaded stays in the document.
    """
    if not isinstance(document, dict):
        return []
    spec = _mapping(document, "spec")
    checkpoints = (_checkpoint_problems(document, path) for path in _REPLICATOR)
    return [*_spec_problems(spec), *(problem for problems in checkpoints for problem in problems)]


def without_effect(document: dict[str, Any]) -> Iterator[DocumentProblem]:
    """Yield a warning for each field that is set and valid but has no effect."""
    if "max_inflight" in _mapping(_mapping(document, "spec"), "batch"):
        text = "has no effect (the next messages are always encoded meanwhile)"
        yield DocumentProblem(("spec", "batch", "max_inflight"), text)
    if "storage" in document:
        text = "has no effect (DELTAFORGE_STATE_URL names the state store, for all pipelines)"
        yield DocumentProblem(("storage",), text)
    for path in _REPLICATOR[:-1]:  # in our own block, the check of unknown fields suggests the name
        block: dict[str, Any] = functools.reduce(_mapping, path, document)
        for field, ours in _REPLICATOR_FIELDS.items():
            if field in block:
                text = f"has no effect (write {'.'.join(_CHECKPOINT)}.{ours})"
                yield DocumentProblem((*path, field), text)
    sensing = _mapping(_mapping(document, "spec"), "schema_sensing")
    if sensing.get("enabled") is True:
        for part, field, instead in _SENSING_WITHOUT_EFFECT:
            if field in _mapping(sensing, part):
                where = ("spec", "schema_sensing", part, field)
                yield DocumentProblem(where, f"has no effect ({instead})")


def _spec_problems(spec: dict[str, Any]) -> Iterator[DocumentProblem]:
    sensing = _mapping(spec, "schema_sensing")
    if sensing.get("enabled") is True and _mapping(sensing, "output").get("emit_events") is True:
        where = ("spec", "schema_sensing", "output", "emit_events")
        yield _not_yet(where, "events of changed schemas are", "set emit_events: false")
    source = str(_mapping(spec, "source").get("type"))
    if source in broken_source_types():
        text = f"is {source}: {broken_source_types()[source]}"
        yield DocumentProblem(("spec", "source", "type"), text)
    sinks = spec.get("sinks")
    for index, sink in enumerate(sinks if isinstance(sinks, tuple) else ()):
        if isinstance(sink, dict):
            yield from _sink_problems(sink, ("spec", "sinks", index))


def _sink_problems(sink: dict[str, Any], path: DocumentPath) -> Iterator[DocumentProblem]:
    kind = str(sink.get("type"))
    if kind in broken_sink_types():
        yield DocumentProblem((*path, "type"), f"is {kind}: {broken_sink_types()[kind]}")


def _checkpoint_problems(document: dict[str, Any], path: DocumentPath) -> list[DocumentProblem]:
    """Return the problems of a block with a replicator's checkpoint options.

    If there are any, the fields that they are about are removed from the document.
    """
    parent = document
    for part in path[:-1]:
        parent = _mapping(parent, str(part))
    block = _mapping(parent, str(path[-1]))
    problems = []
    store, seed = block.get("type"), bare_type(block.get("seeder"))
    if store in {"file", "mongo"}:
        problems.append(
            DocumentProblem(path, f"stores of type {store} are not supported: {ONLY_STATE}")
        )
    kind = seed.get("type") if isinstance(seed, dict) else None
    if kind not in {None, "none"}:
        source = _mapping(_mapping(document, "spec"), "source").get("type")
        text = "is not read: write spec.engine.checkpoint.seed, with type and path"
        chosen = source_types().get(str(source))
        if kind == "chaser" and chosen is not None and chosen.position_at(0) is None:
            text = f"is not supported: {no_chaser()}"
        problems.append(DocumentProblem((*path, "seeder"), text))
    if problems:
        for name in ("type", "path", "database", "seeder"):
            block.pop(name, None)
        if not block:
            del parent[str(path[-1])]
    return problems


def _not_yet(path: DocumentPath, feature: str, instead: str) -> DocumentProblem:
    return DocumentProblem(path, f"{feature} not supported yet ({instead})")


def _mapping(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under `key`, or an empty one that is not part of the document."""
    below = parent.get(key)
    return below if isinstance(below, dict) else {}
