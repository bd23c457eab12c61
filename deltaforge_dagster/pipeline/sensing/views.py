"""Views of the findings of sensing: commands, the API and Dagster show the same JSON values.

A schema is named by the full name of its table, `schema.table` or `db.table`, followed by `:column` if it describes
the documents of one column. Without a column it describes all columns of the table that hold documents, as the
fields of one object. The bare table name is enough if it is unique.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.sensing import SchemaSensing, is_off
from deltaforge_dagster.errors import NotAllowed, SensingDisabled
from deltaforge_dagster.sensing import json_schema as exported
from deltaforge_dagster.sensing.drift import ColumnDrift
from deltaforge_dagster.sensing.fields import children, dotted, name_of, optional, without_root
from deltaforge_dagster.sensing.learning import named_schemas, restored
from deltaforge_dagster.sensing.paths import ANY, ELEMENT, Path
from deltaforge_dagster.sensing.scan import NULL, OBJECT
from deltaforge_dagster.sensing.schema import DocumentSchema, combined
from deltaforge_dagster.sensing.table import TableSense
from deltaforge_dagster.state.store import StateStore

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """A requested schema.

    Attributes:
        name: Its full name.
        table: The findings for its table.
        schema: The schema.
        parts: Names of the schemas that it combines: its own, or those of columns.
    """

    name: str
    table: TableSense
    schema: DocumentSchema
    parts: tuple[str, ...]


def options_of(loaded: LoadedPipeline) -> SchemaSensing:
    """Return a pipeline's `schema_sensing`.

    Raises:
        SensingDisabled: It is not enabled.
    """
    options = loaded.spec.spec.schema_sensing
    if options is None or is_off(options):
        raise SensingDisabled(
            f"{loaded.name}: schema sensing is not enabled (set spec.schema_sensing.enabled: true)"
        )
    return options


def check_exposed(loaded: LoadedPipeline) -> None:
    """Check that the API may show the findings of sensing.

    Raises:
        SensingDisabled: It may not, or sensing is disabled.
    """
    if not options_of(loaded).output.expose_api:
        raise SensingDisabled(f"{loaded.name}: spec.schema_sensing.output.expose_api is false")


def schemas(store: StateStore, loaded: LoadedPipeline) -> list[View]:
    """Return every schema, by name."""
    return [_head(name, table, schema) for name, table, schema in _schemas(store, loaded)]


def schema(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return a schema with its top-level fields.

    Raises:
        NotAllowed: There is no such schema.
    """
    found = _found(store, loaded, table)
    null_rates = options_of(loaded).tracking.null_rates
    inside = [one for one in children(found.schema.fields, ()) if one[-1] != ELEMENT]
    fields = [_field(found.schema, one, null_rates=null_rates) for one in inside]
    return _head(found.name, found.table, found.schema) | {"fields": fields}


def json_schema(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return a schema as JSON Schema.

    Raises:
        NotAllowed: There is no such schema.
        SensingDisabled: The pipeline file disables the export.
    """
    output = options_of(loaded).output
    if not output.export_json_schema:
        raise SensingDisabled(
            f"{loaded.name}: spec.schema_sensing.output.export_json_schema is false"
        )
    found = _found(store, loaded, table)
    return exported.json_schema(found.name, found.schema, output.json_schema_format)


def classifications(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return for each JSON object of a schema its stable fields, and whether its other keys are dynamic (data).

    Raises:
        NotAllowed: There is no such schema.
    """
    found = _found(store, loaded, table)
    schema = found.schema
    objects = [path for path, field in schema.fields.items() if field.counts[OBJECT]]
    return {"table": found.name, "paths": {dotted(path): _names(schema, path) for path in objects}}


def stats(store: StateStore, loaded: LoadedPipeline) -> View:
    """Return the size of the structure cache of each schema, and its hits and misses."""
    most = options_of(loaded).sampling.structure_cache_size
    found = list(_schemas(store, loaded))
    hits = sum(one.hits for _, _, one in found)
    misses = sum(one.misses for _, _, one in found)
    return {
        "tables": [
            {
                "table": name,
                "cached_structures": one.structures,
                "max_cache_size": most,
                "cache_hits": one.hits,
                "cache_misses": one.misses,
            }
            for name, _, one in found
        ],
        "total_cache_hits": hits,
        "total_cache_misses": misses,
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else 0.0,
    }


def drifts(store: StateStore, loaded: LoadedPipeline) -> list[View]:
    """Return the drift of every table whose rows were compared with its schema, by name."""
    options = options_of(loaded)
    tables = _tables(store, loaded)
    return [_drift(name, one, options) for name, one in tables.items() if one.drift.analyzed]


def drift(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return the drift of one table.

    Raises:
        NotAllowed: No rows of a table of that name were compared.
    """
    options = options_of(loaded)
    compared = {name: one for name, one in _tables(store, loaded).items() if one.drift.analyzed}
    name = _chosen(loaded, table, list(compared))
    return _drift(name, compared[name], options)


def recent_drift(store: StateStore, loaded: LoadedPipeline, since: float) -> dict[str, list[str]]:
    """Return, by `table.column`, the kinds of drift that were found since a time, seconds since 1970.

    A column of the schema that no event had at all is listed as `missing_column`, whatever the time.
    """
    enough = options_of(loaded).sampling.warmup_events
    found: dict[str, list[str]] = {}
    for name, table in _tables(store, loaded).items():
        for column, one in sorted(table.drift.columns.items()):
            kinds = [kind for kind, at in one.last_us.items() if at >= since * 1e6]
            if kinds:
                found[f"{name}.{column}"] = sorted(kinds)
        for column in table.drift.missing(enough):
            found[f"{name}.{column}"] = ["missing_column"]
    return dict(sorted(found.items()))


def evolutions(store: StateStore, loaded: LoadedPipeline, table: str) -> list[View]:
    """Return the recorded changes of a schema, the oldest first.

    Raises:
        NotAllowed: There is no such schema.
    """
    parts = _found(store, loaded, table).parts
    entries = [entry for one in parts for entry in store.sensing.evolutions(loaded.name, one)]
    return [
        _evolution(orjson.loads(entry.value))
        | {"table": entry.key, "noted_at": _moment(entry.ts * 1e6)}
        for entry in sorted(entries, key=lambda entry: entry.seq)
    ]


def _evolution(stored: View) -> View:
    """Return a stored change with paths as the other views write them; stored ones begin with `$`."""
    return stored | {"added": [without_root(text) for text in stored["added"]]}


def _tables(store: StateStore, loaded: LoadedPipeline) -> dict[str, TableSense]:
    options = options_of(loaded)
    found = store.sensing.tables(loaded.name)
    return {name: restored(options, state) for name, state in sorted(found.items())}


def _schemas(
    store: StateStore, loaded: LoadedPipeline
) -> Iterator[tuple[str, TableSense, DocumentSchema]]:
    for name, table in _tables(store, loaded).items():
        for key, one in named_schemas(name, table).items():
            yield key, table, one


def _found(store: StateStore, loaded: LoadedPipeline, table: str) -> _Found:
    options = options_of(loaded)
    known: dict[str, _Found] = {}
    for name, sense in _tables(store, loaded).items():
        named = named_schemas(name, sense)
        if named and name not in named:
            rows = combined(options, sense.columns, sense.drift.analyzed)
            known[name] = _Found(name, sense, rows, tuple(named))
        known |= {key: _Found(key, sense, one, (key,)) for key, one in named.items()}
    return known[_chosen(loaded, table, list(known))]


def _chosen(loaded: LoadedPipeline, wanted: str, names: list[str]) -> str:
    """Return the full name that a name denotes, which may be a bare table name."""
    if wanted in names:
        return wanted
    bare = [name for name in names if name.partition(".")[2] == wanted]
    if len(bare) != 1:
        known = ", ".join(names) or "none"
        raise NotAllowed(f"{loaded.name}: nothing is known of {wanted!r} (there is: {known})")
    return bare[0]


def _head(name: str, table: TableSense, schema: DocumentSchema) -> View:
    return {
        "table": name,
        "fingerprint": schema.fingerprint,
        "sequence": schema.sequence,
        "event_count": table.events,
        "sampled_count": schema.sampled,
        "stabilized": schema.stabilized,
        "first_seen": _moment(schema.first_us),
        "last_seen": _moment(schema.last_us),
    }


def _field(schema: DocumentSchema, path: Path, *, null_rates: bool) -> View:
    field = schema.fields[path]
    view: View = {
        "name": name_of(path),
        "types": field.types,
        "nullable": bool(field.counts[NULL]),
        "optional": path[-1] != ANY and optional(schema.fields, path),
    }
    if (*path, ELEMENT) in schema.fields:
        view["array_element_types"] = schema.fields[*path, ELEMENT].types
    inside = [one for one in schema.fields if len(one) > len(path) and one[: len(path)] == path]
    if field.counts[OBJECT]:
        view["nested_field_count"] = len(inside)
    if null_rates and field.total:
        view["null_rate"] = round(field.counts[NULL] / field.total, 4)
    if field.values.format is not None:
        view["format"] = field.values.format
    if field.values.enumeration is not None:
        view["enum"] = field.values.enumeration
    return view | field.values.statistics()


def _names(schema: DocumentSchema, path: Path) -> View:
    inside = [one for one in children(schema.fields, path) if one[-1] not in {ANY, ELEMENT}]
    names = schema.maps.get(path)
    view: View = {
        "stable_fields": sorted(name_of(one) for one in inside),
        "has_dynamic_fields": names is not None,
        "unique_keys": len(inside) + (names.unique if names is not None else 0),
    }
    return view if names is None else view | {"frequent_keys": names.frequent}


def _drift(name: str, table: TableSense, options: SchemaSensing) -> View:
    found = table.drift
    columns = [_column(column, one) for column, one in sorted(found.columns.items())]
    columns += [
        _column(column, ColumnDrift(found.declared[column]))
        | {"mismatch_count": found.compared, "problems": {"missing_column": found.compared}}
        for column in found.missing(options.sampling.warmup_events)
    ]
    return {
        "table": name,
        "has_drift": bool(columns),
        "columns": columns,
        "events_analyzed": found.analyzed,
        "events_with_drift": found.drifted,
    }


def _column(name: str, column: ColumnDrift) -> View:
    return {
        "column": name,
        "expected_type": column.expected,
        "observed_types": column.observed,
        "mismatch_count": sum(column.counts.values()),
        "examples": column.examples,
        "problems": dict(column.counts),
        "last_seen": {kind: _moment(at) for kind, at in column.last_us.items()},
    }


def _moment(microseconds: float) -> str:
    moment = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
