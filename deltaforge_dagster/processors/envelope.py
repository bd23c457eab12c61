"""The native event as JSON text, put together for whole batches of the change frame.

Row images, DDL payloads and tags are JSON text in the frame already, so an envelope is nothing but
concatenation: nothing parses or writes them again. What comes from elsewhere as plain text (names
of databases, schemas, tables, binlog files) is escaped, once per name and batch. Key order and
presence::

    before after source{version connector name ts_ms db [schema] table [snapshot] [position...]}
    op ts_ms [transaction{id}] event_id tenant_id [schema_version] [schema_sequence] [ddl] [tags]
    [tx_end]

Keys in brackets are absent when unset, the others are there with `null`. The position keys are
`lsn`, `txId` for PostgreSQL and `server_id`, `gtid`, `file`, `pos` for MySQL; a snapshot row has
none. A DDL event says `"op":"r"`, too, and is told from a snapshot row by its `ddl` and its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster import __version__
from deltaforge_dagster.processors.text import (
    Mask,
    Optional,
    Piece,
    Values,
    concat,
    constant,
    decimals,
    flags,
    lsns,
    values_of,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What every event of a pipeline says about where it comes from.

    Attributes:
        connector: `postgresql` or `mysql`.
        name: Id of the source.
        tenant: `metadata.tenant`.
        server_id: MySQL: the replication server id that we read with.
    """

    connector: str
    name: str
    tenant: str
    server_id: int | None = None

    @property
    def version(self) -> str:
        """Who wrote the event: `deltaforge-<version of this package>`."""
        return f"deltaforge-{__version__}"


def native_envelope(origin: Origin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return the native event of each row of a change frame as JSON text.

    A row that a processor marked `raw_payload` becomes its `after` image alone, or `null`.

    Raises:
        UnsupportedEvent: The texts need more than 2 GiB.
    """
    ts_ms = decimals(frame.column("ts_us"), 1000)
    pieces: list[Piece] = [
        '{"before":', Optional("", values_of(frame.column("before")), "", "null"),
        ',"after":', Optional("", values_of(frame.column("after")), "", "null"),
        f',"source":{{"version":{_json(origin.version)},"connector":{_json(origin.connector)}',
        f',"name":{_json(origin.name)}', Optional(',"ts_ms":', ts_ms),
        *(Optional(f',"{name}":', _names(frame.column(name))) for name in ("db", "schema", "table")),
        *_place(origin, frame),
        Optional('},"op":"', wire_op(frame)),
        Optional('","ts_ms":', ts_ms),
        Optional(',"transaction":{"id":"', values_of(frame.column("tx_id")), '"}'),
        Optional(',"event_id":"', values_of(frame.column("event_id"))),
        f'","tenant_id":{_json(origin.tenant)}',
        Optional(',"schema_version":"', values_of(frame.column("schema_version")), '"'),
        Optional(',"schema_sequence":', decimals(frame.column("schema_sequence"))),
        Optional(',"ddl":', values_of(frame.column("ddl"))),
        Optional(',"tags":', values_of(frame.column("tags"))),
        Optional(',"tx_end":', flags(frame.column("tx_end").to_numpy(zero_copy_only=False))),
        "}",
    ]  # fmt: skip
    events = concat(frame.num_rows, pieces)
    raw = frame.column("raw_payload")
    if not pc.any(raw).as_py():
        return events
    after = frame.column("after").fill_null("null")
    chosen: pa.StringArray = pc.if_else(raw, after, events)
    return chosen


def _place(origin: Origin, frame: pa.RecordBatch) -> list[Piece]:
    """Return the pieces that say where in the log each row stands, or that it is of a snapshot."""
    snapshot = is_snapshot(frame)
    pieces = _POSITIONS[origin.connector](origin, frame)
    if not snapshot.any():
        return [*pieces]
    streamed: list[Piece] = [
        Optional(one.before, None if one.values is None else one.values.where(~snapshot), one.after)
        for one in pieces
    ]
    return [Optional(',"snapshot":"', flags(snapshot), '"'), *streamed]


def wire_op(frame: pa.RecordBatch) -> Values | None:
    """Return the `op` of each event: the frame's, but `r` for DDL."""
    op = frame.column("op")
    assert isinstance(op, pa.DictionaryArray)
    letters = ["r" if one == "ddl" else one for one in op.dictionary.to_pylist()]
    return values_of(pa.DictionaryArray.from_arrays(op.indices, pa.array(letters, pa.string())))


def is_snapshot(frame: pa.RecordBatch) -> Mask:
    """Say which rows were read by a snapshot; these have no place in the log."""
    return cast("Mask", pc.equal(frame.column("op"), pa.scalar("r")).to_numpy(zero_copy_only=False))


def _postgres_position(_: Origin, frame: pa.RecordBatch) -> list[Optional]:
    return [
        Optional(',"lsn":"', lsns(frame.column("pos")), '"'),
        Optional(',"txId":', values_of(frame.column("tx_id"))),
    ]


def _mysql_position(origin: Origin, frame: pa.RecordBatch) -> list[Optional]:
    server_id = None if origin.server_id is None else constant(str(origin.server_id))
    return [
        Optional(',"server_id":', server_id),
        Optional(',"gtid":"', values_of(frame.column("tx_id")), '"'),
        Optional(',"file":', _names(frame.column("file"))),
        Optional(',"pos":', decimals(frame.column("pos"))),
    ]


_POSITIONS: Mapping[str, Callable[[Origin, pa.RecordBatch], list[Optional]]] = {
    "postgresql": _postgres_position,
    "mysql": _mysql_position,
}


def _names(column: pa.Array[Any]) -> Values | None:
    """Return names as JSON strings."""
    assert isinstance(column, pa.DictionaryArray)
    names = [None if one is None else _json(one) for one in column.dictionary.to_pylist()]
    return values_of(pa.DictionaryArray.from_arrays(column.indices, pa.array(names, pa.string())))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
