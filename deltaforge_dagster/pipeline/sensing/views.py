"""Views of the findings of sensing: commands, the API and Dagster show the same JSON values.

A schema is named by the full name of its table, `schema.table` or `db.table`, followed by `:column`
if it describes the documents of one column. Without a column it describes all columns of the table
that hold documents, as the fields of one object. The bare table name is enough if it is unique.
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
from deltaforge_dagster.sensing.scan import ANY, ELEMENT, NULL, OBJECT, Path
from deltaforge_dagster.sensing.schema import DocumentSchema, combined
from deltaforge_dagster.sensing.table import TableSense
from deltaforge_dagster.state.store import StateStore

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _RequestedSchema:
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
        SensingDisabled: Sensing is not enabled.
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
        SensingDisabled: The pipeline file does not allow that, or sensing is disabled.
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
    requested = _requested(store, loaded, table)
    null_rates = options_of(loaded).tracking.null_rates
    inside = [path for path in children(requested.schema.fields, ()) if path[-1] != ELEMENT]
    fields = [_field(requested.schema, path, null_rates=null_rates) for path in inside]
    return _head(requested.name, requested.table, requested.schema) | {"fields": fields}


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
    requested = _requested(store, loaded, table)
    return exported.json_schema(requested.name, requested.schema, output.json_schema_format)


def classifications(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return the stable fields of each JSON object of a schema.

    Also says for each object whether its other keys are dynamic (data).

    Raises:
        NotAllowed: There is no such schema.
    """
    requested = _requested(store, loaded, table)
    schema = requested.schema
    objects = [path for path, field in schema.fields.items() if field.counts[OBJECT]]
    return {
        "table": requested.name,
        "paths": {dotted(path): _names(schema, path) for path in objects},
    }


def stats(store: StateStore, loaded: LoadedPipeline) -> View:
    """Return the size of the structure cache of each schema, and its hits and misses."""
    most = options_of(loaded).sampling.structure_cache_size
    listed = list(_schemas(store, loaded))
    hits = sum(schema.hits for _, _, schema in listed)
    misses = sum(schema.misses for _, _, schema in listed)
    return {
        "tables": [
            {
                "table": name,
                "cached_structures": schema.structures,
                "max_cache_size": most,
                "cache_hits": schema.hits,
                "cache_misses": schema.misses,
            }
            for name, _, schema in listed
        ],
        "total_cache_hits": hits,
        "total_cache_misses": misses,
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else 0.0,
    }


def drifts(store: StateStore, loaded: LoadedPipeline) -> list[View]:
    """Return the drift of every table whose rows were compared with its schema, by name."""
    options = options_of(loaded)
    tables = _tables(store, loaded)
    return [_drift(name, sense, options) for name, sense in tables.items() if sense.drift.analyzed]


def drift(store: StateStore, loaded: LoadedPipeline, table: str) -> View:
    """Return the drift of one table.

    Raises:
        NotAllowed: No rows of a table of that name were compared.
    """
    options = options_of(loaded)
    compared = {
        name: sense for name, sense in _tables(store, loaded).items() if sense.drift.analyzed
    }
    name = _chosen(loaded, table, list(compared))
    return _drift(name, compared[name], options)


def recent_drift(store: StateStore, loaded: LoadedPipeline, since: float) -> dict[str, list[str]]:
    """Return, by `table.column`, the kinds of drift found since a time, in seconds since 1970.

    A column of the schema that no event had at all is listed as `missing_column`, whatever the
    time.
    """
    enough = options_of(loaded).sampling.warmup_events
    drifted: dict[str, list[str]] = {}
    for name, table in _tables(store, loaded).items():
        for column, column_drift in sorted(table.drift.columns.items()):
            kinds = [kind for kind, at in column_drift.last_us.items() if at >= since * 1e6]
            if kinds:
                drifted[f"{name}.{column}"] = sorted(kinds)
        for column in table.drift.missing(enough):
            drifted[f"{name}.{column}"] = ["missing_column"]
    return dict(sorted(drifted.items()))


def evolutions(store: StateStore, loaded: LoadedPipeline, table: str) -> list[View]:
    """Return the recorded changes of a schema, the oldest first.

    Raises:
        NotAllowed: There is no such schema.
    """
    parts = _requested(store, loaded, table).parts
    recorded = [
        evolution for part in parts for evolution in store.sensing.evolutions(loaded.name, part)
    ]
    return [
        _evolution(orjson.loads(evolution.value))
        | {"table": evolution.key, "noted_at": _moment(evolution.ts * 1e6)}
        for evolution in sorted(recorded, key=lambda evolution: evolution.seq)
    ]


def _evolution(stored: View) -> View:
    """Return a stored change with paths as the other views write them.

    Stored paths begin with `$`.
    """
    return stored | {"added": [without_root(text) for text in stored["added"]]}


def _tables(store: StateStore, loaded: LoadedPipeline) -> dict[str, TableSense]:
    options = options_of(loaded)
    states = store.sensing.tables(loaded.name)
    return {name: restored(options, state) for name, state in sorted(states.items())}


def _schemas(
    store: StateStore, loaded: LoadedPipeline
) -> Iterator[tuple[str, TableSense, DocumentSchema]]:
    for name, table in _tables(store, loaded).items():
        for key, schema in named_schemas(name, table).items():
            yield key, table, schema


def _requested(store: StateStore, loaded: LoadedPipeline, table: str) -> _RequestedSchema:
    options = options_of(loaded)
    by_name: dict[str, _RequestedSchema] = {}
    for name, sense in _tables(store, loaded).items():
        named = named_schemas(name, sense)
        if named and name not in named:
            rows = combined(options, sense.columns, sense.drift.analyzed)
            by_name[name] = _RequestedSchema(name, sense, rows, tuple(named))
        by_name |= {
            key: _RequestedSchema(key, sense, schema, (key,)) for key, schema in named.items()
        }
    return by_name[_chosen(loaded, table, list(by_name))]


def _chosen(loaded: LoadedPipeline, wanted: str, names: list[str]) -> str:
    """Return the full name that a name denotes, which may be a bare table name."""
    if wanted in names:
        return wanted
    bare = [name for name in names if name.partition(".")[2] == wanted]
    if len(bare) != 1:
        listing = ", ".join(names) or "none"
        raise NotAllowed(f"{loaded.name}: nothing is known of {wanted!r} (there is: {listing})")
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
    inside = [
        inner for inner in schema.fields if len(inner) > len(path) and inner[: len(path)] == path
    ]
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
    inside = [inner for inner in children(schema.fields, path) if inner[-1] not in {ANY, ELEMENT}]
    names = schema.maps.get(path)
    view: View = {
        "stable_fields": sorted(name_of(inner) for inner in inside),
        "has_dynamic_fields": names is not None,
        "unique_keys": len(inside) + (names.unique if names is not None else 0),
    }
    return view if names is None else view | {"frequent_keys": names.frequent}


def _drift(name: str, table: TableSense, options: SchemaSensing) -> View:
    table_drift = table.drift
    columns = [
        _column(column, column_drift)
        for column, column_drift in sorted(table_drift.columns.items())
    ]
    columns += [
        _column(column, ColumnDrift(table_drift.declared[column]))
        | {
            "mismatch_count": table_drift.compared,
            "problems": {"missing_column": table_drift.compared},
        }
        for column in table_drift.missing(options.sampling.warmup_events)
    ]
    return {
        "table": name,
        "has_drift": bool(columns),
        "columns": columns,
        "events_analyzed": table_drift.analyzed,
        "events_with_drift": table_drift.drifted,
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
