"""The destinations of a pipeline's messages, as far as the pipeline file determines them."""

from __future__ import annotations

from deltaforge_dagster.config.sinks import SinkConfig
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.config.templates import filled
from deltaforge_dagster.sources.registry import source_types


def destinations(sink: SinkConfig, source: SourceBlock) -> list[str]:
    """Return the destinations of a sink, with unknown variables left as they are.

    `${source.table}` and its schema or database are known if no pattern in `tables` has a wildcard.
    """
    kind = source_types()[source.type]
    names = [kind.table_variables(pattern) for pattern in source.config.tables]
    if not names or any("*" in part or "%" in part for name in names for part in name.values()):
        names = [{}]
    return list(dict.fromkeys(filled(sink.destination, sink.variables(name)) for name in names))
