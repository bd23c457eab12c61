"""What a pipeline file may say and this version does not do.

DeltaForge's files have more fields than this version reads. A field that changes what is delivered
must never be left out in silence: it is a problem, named at its place. A field that means nothing
here, or asks for nothing, is taken out of the document before the models see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deltaforge_dagster.config.document import DocumentPath, Problem

UNREAD = ("apiVersion", "kind")
UNREAD_IN_SPEC = ("sharding", "connection_policy")
"""Accepted and not read, by the original too."""

LATER_SOURCES = frozenset({"turso"})
LATER_SINKS = frozenset({"nats", "http", "s3", "clickhouse"})
LATER_ENVELOPES = frozenset({"debezium", "cloudevents"})


def take_unsupported(document: Any) -> list[Problem]:
    """Take everything out of `document` that the models do not know on purpose.

    Returns:
        One problem for each feature that the file asks for and this version lacks. The `type` of a
        source or sink that is not supported stays; its problem covers the whole block.
    """
    if not isinstance(document, dict):
        return []
    for key in UNREAD:
        document.pop(key, None)
    spec = _mapping(document, "spec")
    for key in UNREAD_IN_SPEC:
        spec.pop(key, None)
    return list(_spec_problems(spec))


def without_effect(document: dict[str, Any]) -> Iterator[Problem]:
    """Yield what the file sets, the models check, and nothing reads yet; worth a warning."""
    spec = _mapping(document, "spec")
    if "batch" in spec:
        text = "has no effect in this version (a segment is what is acknowledged together)"
        yield Problem(("spec", "batch"), text)


def _spec_problems(spec: dict[str, Any]) -> Iterator[Problem]:
    processors = spec.pop("processors", ())
    if not isinstance(processors, tuple):
        yield Problem(("spec", "processors"), "must be a list")
    else:
        for index in range(len(processors)):
            yield _not_yet(("spec", "processors", index), "processors are", "remove it")
    if _asks(spec.pop("schema_sensing", None), "enabled"):
        yield _not_yet(("spec", "schema_sensing"), "schema sensing is", "set enabled: false")
    if _asks(spec.pop("journal", None), "enabled"):
        yield _not_yet(("spec", "journal"), "the dead letter journal is", "set enabled: false")
    if spec.pop("sink_batch_deadline_secs", None) is not None:
        path = ("spec", "sink_batch_deadline_secs")
        yield _not_yet(path, "a deadline over a sink's batches is", "use the sink's own timeouts")
    yield from _source_problems(_mapping(spec, "source"))
    sinks = spec.get("sinks")
    for index, sink in enumerate(sinks if isinstance(sinks, tuple) else ()):
        if isinstance(sink, dict):
            yield from _sink_problems(sink, ("spec", "sinks", index))


def _source_problems(source: dict[str, Any]) -> Iterator[Problem]:
    here: DocumentPath = ("spec", "source")
    if source.get("type") in LATER_SOURCES:
        yield _not_yet((*here, "type"), f"{source['type']} sources are", "postgres and mysql are")
        return
    config = _mapping(source, "config")
    here = (*here, "config")
    snapshot = config.pop("snapshot", None)
    if snapshot is not None and not (
        isinstance(snapshot, dict) and snapshot.get("mode") == "never"
    ):
        # A block without `mode` means `initial`.
        yield _not_yet((*here, "snapshot"), "snapshots are", "set mode: never")
    if config.pop("outbox", None) is not None:
        yield _not_yet((*here, "outbox"), "outbox capture is", "remove it")


def _sink_problems(sink: dict[str, Any], here: DocumentPath) -> Iterator[Problem]:
    if sink.get("type") in LATER_SINKS:
        yield _not_yet((*here, "type"), f"{sink['type']} sinks are", "redis, kafka and file are")
        return
    config = _mapping(sink, "config")
    here = (*here, "config")
    envelope = _type_of(config.get("envelope"))
    if envelope in LATER_ENVELOPES:
        del config["envelope"]
        yield _not_yet((*here, "envelope"), f"the {envelope} envelope is", "native is")
    if _type_of(config.get("encoding")) == "avro":
        del config["encoding"]
        yield _not_yet((*here, "encoding"), "avro is", "json is")
    if config.pop("filter", None):
        yield _not_yet((*here, "filter"), "sink filters are", "remove it")


def _not_yet(path: DocumentPath, what: str, instead: str) -> Problem:
    return Problem(path, f"{what} not supported yet ({instead})")


def _asks(block: object, flag: str) -> bool:
    return block is not None and not (isinstance(block, dict) and block.get(flag, False) is False)


def _type_of(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else value


def _mapping(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under `key`, or an empty one that is no part of the document."""
    below = parent.get(key)
    return below if isinstance(below, dict) else {}
