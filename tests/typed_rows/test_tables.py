from __future__ import annotations

from typing import Any

import pyarrow as pa

from deltaforge_dagster.frame import CAPTURED, PROCESSED
from deltaforge_dagster.sources.value_types import INT64, TEXT
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_dagster.typed_rows.tables import TypedTable, VersionName, typed_tables

_REQUIRED = {"op": "u", "ts_us": 0, "db": "shop", "row": 0, "tx_end": False, "event_id": "", "raw_payload": False}  # fmt: skip


def frame(*changes: dict[str, Any], schema: pa.Schema = CAPTURED) -> pa.RecordBatch:
    """Return a change frame with these values, null elsewhere."""
    empty = dict.fromkeys(schema.names)
    return pa.RecordBatch.from_pylist([empty | _REQUIRED | one for one in changes], schema=schema)


def by_version(rows: pa.RecordBatch) -> list[TypedTable]:
    """Return typed tables with an integer `id`, and in version `v2` a text `note`."""

    def schema_of(version: VersionName) -> TypedSchema:
        columns = [TypedColumn("id", INT64)]
        if version.schema_version == "v2":
            columns.append(TypedColumn("note", TEXT))
        return TypedSchema(tuple(columns))

    return list(typed_tables(rows, schema_of))


def test_each_version_has_its_own_columns() -> None:
    """Rows are put together by table version, and know their places in the frame."""
    rows = frame(
        {"table": "b", "schema_version": "v2", "after": '{"id":1,"note":"x"}'},
        {"table": "a", "schema_version": "v1", "after": '{"id":2}'},
        {"table": "b", "schema_version": "v1", "after": '{"id":3}'},
        {"table": "b", "schema_version": "v2", "after": '{"id":4,"note":null}'},
        {"table": "b", "schema": "s", "schema_version": "v2", "after": '{"id":5,"note":"y"}'},
        {"table": "b", "after": '{"id":6,"made":true}'},
    )

    found = by_version(rows)

    assert [(one.version, one.places.tolist(), one.rows.batch.to_pylist()) for one in found] == [
        (VersionName("shop", None, "b", "v2"), [0, 3], [{"id": 1, "note": "x"}, {"id": 4, "note": None}]),
        (VersionName("shop", None, "a", "v1"), [1], [{"id": 2}]),
        (VersionName("shop", None, "b", "v1"), [2], [{"id": 3}]),
        (VersionName("shop", "s", "b", "v2"), [4], [{"id": 5, "note": "y"}]),
        (VersionName("shop", None, "b", None), [5], [{"id": 6, "made": "true"}]),
    ]  # fmt: skip


def test_deletes_are_what_was_deleted() -> None:
    """The row of a delete is its image before, or else its key, with all other columns absent."""
    rows = frame(
        {"table": "b", "schema_version": "v2", "op": "d", "before": '{"id":1,"note":"x"}', "key": '{"id":1}'},
        {"table": "b", "schema_version": "v2", "op": "d", "key": '{"id":2}'},
        {"table": "b", "schema_version": "v2", "before": '{"id":3,"note":"old"}', "after": '{"id":3,"note":"new"}'},
    )  # fmt: skip

    (found,) = by_version(rows)

    assert found.rows.batch.to_pylist() == [
        {"id": 1, "note": "x"},
        {"id": 2, "note": None},
        {"id": 3, "note": "new"},
    ]
    assert found.rows.present["note"].to_pylist() == [True, False, True]


def test_events_without_rows_are_in_no_table() -> None:
    """Truncates and schema changes have no row; a frame without rows has no tables."""
    truncate = {"table": "b", "schema_version": "v1", "op": "t", "ddl": "{}"}
    row = {"table": "b", "schema_version": "v1", "after": '{"id":1}'}

    assert by_version(frame(truncate)) == []
    assert by_version(frame(truncate).slice(1)) == []
    (found,) = by_version(frame(truncate, row, truncate))
    assert found.places.tolist() == [1]


def test_frames_of_any_layout() -> None:
    """Processed changes, slices of frames, and names that are no dictionaries are read as well."""
    rows = frame(*({"table": "b", "schema_version": "v1", "after": f'{{"id":{n}}}'} for n in range(4)), schema=PROCESSED)  # fmt: skip
    plain = rows.set_column(
        rows.schema.get_field_index("table"), "table", rows.column("table").cast(pa.string())
    )

    for one in (rows, plain):
        (found,) = by_version(one.slice(1, 2))
        assert found.rows.batch.to_pylist() == [{"id": 1}, {"id": 2}]
        assert found.places.tolist() == [0, 1]
