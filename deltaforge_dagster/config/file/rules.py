"""Check rules between the blocks of a pipeline file, and warn about probable mistakes.

The models check what concerns a single block. Rules between blocks are checked as far as the blocks
can be read. A file with a probable mistake loads and does what it says, with a warning.

DeltaForge's files have more fields than this version reads. A field that changes what is delivered
must never be ignored silently: it is reported as a problem at its path (`take_unsupported`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deltaforge_dagster.config.blocks import bare_type
from deltaforge_dagster.config.engine import ONLY_STATE
from deltaforge_dagster.config.file.document import (
    Document,
    DocumentPath,
    DocumentProblem,
    format_path,
)
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import AvroEncoding, MessageSinkConfig, SinkBlock
from deltaforge_dagster.config.sources import Snapshot, SourceConfig
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sinks.registry import broken_sink_types
from deltaforge_dagster.sources.registry import (
    broken_source_types,
    no_chaser,
    parse_position,
    source_types,
)

_WORDS_NULL = frozenset({"empty_object", "empty_list"})


def unquoted_nulls(document: Document) -> Iterator[DocumentProblem]:
    """Yield a problem for each field with YAML's null where the text `null` was probably meant."""
    for path in document.lines:
        if path[:2] == ("spec", "processors") and path[-1] in _WORDS_NULL:
            block = document.at(path[:-1])
            if isinstance(block, dict) and path[-1] not in block:
                text = "has no value (the word null needs quotes: YAML's own null is no value)"
                yield DocumentProblem(path, text)


def rules(value: Mapping[str, Any]) -> Iterator[DocumentProblem]:
    """Yield a problem for each violated rule between the blocks of a document."""
    spec = value.get("spec")
    if isinstance(spec, dict):
        yield from _no_position(spec)
    sinks = spec.get("sinks") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(sinks, tuple):
        return
    ids = [_id(sink.get("config")) if isinstance(sink, dict) else None for sink in sinks]
    yield from _repeated(ids, "sinks", "config", "id")
    processors = spec.get("processors")
    if isinstance(processors, tuple):
        yield from _repeated([_id(processor) for processor in processors], "processors", "id")
        yield from _without_outbox(spec.get("source"), processors)
    policy = spec.get("commit_policy")
    quorum = policy.get("quorum") if isinstance(policy, dict) else None
    if isinstance(quorum, int) and quorum > len(sinks):
        text = f"is {quorum}, but there are only {len(sinks)} sinks"
        yield DocumentProblem(("spec", "commit_policy", "quorum"), text)


def advice(spec: PipelineSpec) -> Iterator[DocumentProblem]:
    """Yield a warning for each valid setting that is probably wrong, with what to write instead."""
    yield from _snapshot(spec.spec.source.config.snapshot)
    for index, sink in enumerate(spec.spec.sinks):
        path = ("spec", "sinks", index, "config")
        yield from _filter(sink, path)
        yield from _key(sink, path)
        yield from _subject(sink, path, spec.spec.source.config)


def _no_position(spec: Mapping[str, Any]) -> Iterator[DocumentProblem]:
    """Yield a problem if the seed's position is not a valid position of any kind of source."""
    try:
        fields = spec["engine"]["checkpoint"]["seed"]["position"]
    except (KeyError, TypeError):
        return
    if not isinstance(fields, dict) or not all(
        part is None or type(part) in {str, int} for part in fields.values()
    ):
        return  # the models report what is wrong
    try:
        parse_position(json.dumps(fields))
    except CorruptLog:
        examples = [kind.position_example for kind in source_types().values()]
        text = f"is not a position (write {', or '.join(filter(None, examples))})"
        yield DocumentProblem(("spec", "engine", "checkpoint", "seed", "position"), text)


def _without_outbox(source: object, processors: tuple[Any, ...]) -> Iterator[DocumentProblem]:
    """Yield a problem for each outbox processor whose source captures no outbox."""
    config = source.get("config") if isinstance(source, dict) else None
    if not isinstance(config, dict) or "outbox" in config:
        return
    for index, processor in enumerate(processors):
        if isinstance(processor, dict) and processor.get("type") == "outbox":
            kinds = sorted(source_types().values(), key=lambda kind: kind.title)
            outboxes = [f"`{kind.outbox}` of {kind.title}" for kind in kinds if kind.outbox]
            text = (
                "nothing is captured from an outbox (set spec.source.config.outbox: "
                f"{', '.join(outboxes)})"
            )
            yield DocumentProblem(("spec", "processors", index), text)


def _id(block: object) -> str | None:
    """Return the id of a block; the default is its type."""
    if not isinstance(block, dict):
        return None
    block_id = block.get("id", block.get("type"))
    return block_id if isinstance(block_id, str) else None


def _repeated(ids: list[str | None], block: str, *field: str) -> Iterator[DocumentProblem]:
    """Yield a problem for each id that an earlier entry of the list already has."""
    seen: dict[str, int] = {}
    for index, block_id in enumerate(ids):
        if block_id is not None and seen.setdefault(block_id, index) != index:
            first = format_path(("spec", block, seen[block_id]))
            text = f"{block_id} is also the id of {first} (ids must be unique)"
            yield DocumentProblem(("spec", block, index, *field), text)


def _snapshot(block: Snapshot | None) -> Iterator[DocumentProblem]:
    if block is not None and "mode" not in block.model_fields_set:
        text = (
            "has no `mode`, so that tables are read only on request (write mode: initial to have"
            " them read once, or mode: never)"
        )
        yield DocumentProblem(("spec", "source", "config", "snapshot"), text)


def _filter(sink: SinkBlock, path: DocumentPath) -> Iterator[DocumentProblem]:
    chosen = sink.config.filter
    if chosen is None or not chosen.exclude_synthetic:
        return
    other = "synthetic_only" if chosen.synthetic_only else "producers" if chosen.producers else None
    if other is not None:
        text = f"exclude_synthetic and {other} together let nothing pass (remove one of them)"
        yield DocumentProblem((*path, "filter"), text)


def _subject(
    sink: SinkBlock, path: DocumentPath, source: SourceConfig
) -> Iterator[DocumentProblem]:
    """Yield a warning if the schemas of several tables become versions of one subject."""
    config = sink.config
    if not isinstance(config, MessageSinkConfig) or not isinstance(config.encoding, AvroEncoding):
        return
    tables: Sequence[str] = getattr(source, "tables", ())
    one_table = len(tables) == 1 and not set("*?[%") & set(tables[0])
    by_topic = config.encoding.subject_strategy == "topic_name"
    if by_topic and not one_table and not compile_template(config.destination).variables:
        text = (
            "topic_name makes the schemas of all tables versions of one subject, which the "
            "registry may refuse "
            "(write topic_record_name, or a topic for each table: ${source.table})"
        )
        yield DocumentProblem((*path, "encoding", "subject_strategy"), text)


def _key(sink: SinkBlock, path: DocumentPath) -> Iterator[DocumentProblem]:
    if not isinstance(sink.config, MessageSinkConfig) or sink.config.key is None:
        return
    for variable in compile_template(sink.config.key).variables:
        image, *fields = variable.path
        if image == "after":
            instead = (
                f" (use ${{key.{fields[0]}}} for a column of the primary key)" if fields else ""
            )
            name = ".".join(variable.path)
            yield DocumentProblem((*path, "key"), f"${{{name}}} is empty text in a delete{instead}")


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
