"""Checks the schema registry of a sink before a run. Nothing is registered."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sinks.schema_registry.client import SchemaRegistryClient
from deltaforge_dagster.sinks.schema_registry.sink import subject_of
from deltaforge_dagster.sources.findings import Finding


def findings(sink_id: str, encoding: AvroEncoding, names: Sequence[str]) -> list[Finding]:
    """Return whether a registry answers and accepts the login, and which compatibility it demands.

    Args:
        sink_id: The sink.
        encoding: Its registry.
        names: Its destinations; those that depend on changes are templates.
    """
    about = f"sink {sink_id}"
    with contextlib.closing(SchemaRegistryClient(sink_id, encoding)) as registry:
        try:
            existing = set(registry.subjects())
            by_topic = encoding.subject_strategy == "topic_name"
            topics = [name for name in names if by_topic and not compile_template(name).variables]
            subjects: list[str | None] = [
                subject_of(encoding.subject_strategy, topic, "") for topic in topics
            ]
            levels = {subject: registry.compatibility(subject) for subject in subjects or [None]}
        except DeltaforgeError as error:
            return [Finding(about, "error", str(error).removeprefix(f"{about}: "))]
    where = f"the schema registry at {encoding.schema_registry_url}"
    report = [Finding(about, "ok", f"{where} answers")]
    for subject, level in levels.items():
        label = "its subjects" if subject is None else f"subject {subject!r}"
        if subject is not None and subject not in existing:
            label += ", which it does not have yet,"
        if level is None:
            text = f"which compatibility {where} demands for {label} it does not tell this user"
            report.append(Finding(about, "note", text))
        else:
            report.append(Finding(about, "ok", f"the compatibility of {label} is {level}"))
    return report
