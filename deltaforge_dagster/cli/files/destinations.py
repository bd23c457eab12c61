"""The destinations of a pipeline's messages, as far as the pipeline file determines them."""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.config.sources.sources import PostgresSource, Source
from deltaforge_dagster.config.sources.turso import TursoSource
from deltaforge_dagster.config.templates import Variable, compile_template


def destinations(template: str, source: Source) -> list[str]:
    """Return the destinations that a template yields, with unknown variables left as they are.

    `${source.table}` and its schema or database are known if no pattern in `tables` has a wildcard.
    """
    names = [_table(pattern, source) for pattern in source.config.tables]
    if not names or any("*" in part or "%" in part for name in names for part in name.values()):
        names = [{}]
    return list(dict.fromkeys(_filled(template, name) for name in names))


def _filled(template: str, known: Mapping[str, str]) -> str:
    parts = []
    for part in compile_template(template).parts:
        path = ".".join(part.path) if isinstance(part, Variable) else None
        parts.append(str(part) if path is None else known.get(path, f"${{{path}}}"))
    return "".join(parts)


def _table(pattern: str, source: Source) -> dict[str, str]:
    """Return the template variables whose values follow from one pattern in `tables`."""
    first, dot, rest = pattern.partition(".")
    if isinstance(source, TursoSource):
        return {"source.db": "main", "source.table": pattern}
    if not isinstance(source, PostgresSource):
        return {"source.db": first, "source.table": rest} if dot else {"source.table": first}
    schema, table = (first, rest) if dot else ("public", first)
    return {"source.schema": schema, "source.table": table}
