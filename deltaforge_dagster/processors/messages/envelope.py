"""Build the JSON text of events in each envelope, for whole batches of the change frame.

Row images, DDL payloads and tags are already JSON text in the frame, so an envelope only
concatenates texts, and nothing is parsed or serialized again. Plain text from elsewhere (names of
databases, schemas, tables, log files) is escaped, once per name and batch.

The *native* event, its keys in this order::

    before after source{version connector name ts_ms db [schema] table [snapshot] [position...]}
    op ts_ms [transaction{id}] event_id tenant_id [schema_version] [schema_sequence] [ddl] [tags]
    [synthetic] [tx_end]

Keys in brackets are absent when unset; the others are then `null`. The position keys depend on the
kind of source (`SourceType.position_fields`); a snapshot row has none. A DDL event also has
`"op":"r"`; its `ddl` and its position distinguish it from a snapshot row.

The *debezium* envelope is `{"schema":null,"payload":<native event>}`. *cloudevents* is an event in
CloudEvents' JSON format ("CloudEvents - Version 1.0.2", "JSON Event Format")::

    specversion "1.0"   id event_id   source deltaforge/<source>/<table>   type <prefix>.<what>
    time 2025-01-02T03:04:05.006Z   datacontenttype "application/json"   subject <table>
    data{before after op [ddl]}

A table is `schema.table`, or `db.table` if the source has no schemas. `<what>` is one of `created`,
`updated`, `deleted`, `snapshot`, `truncated`. Only DDL events have `ddl`; their `<what>` is
`snapshot`, because their `op` is `r`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster import __version__
from deltaforge_dagster.kernels.message_text import (
    Mask,
    Optional,
    Piece,
    Values,
    concat,
    constant,
    decimals,
    flags,
    lsns,
    times,
    values_of,
)
from deltaforge_dagster.sources.registry import PositionField


@dataclass(frozen=True, slots=True)
class EventOrigin:
    """The constant fields of every event of a pipeline that say where it comes from.

    Attributes:
        connector: The name of the kind of source in events (`SourceType.connector`).
        name: Id of the source.
        tenant: `metadata.tenant`.
        position_fields: The fields that say where in the log a change is.
    """

    connector: str
    name: str
    tenant: str
    position_fields: tuple[PositionField, ...] = ()

    @property
    def version(self) -> str:
        """The program that wrote the event: `deltaforge-<version of this package>`."""
        return f"deltaforge-{__version__}"


Envelope: TypeAlias = "Callable[[EventOrigin, pa.RecordBatch], pa.StringArray]"
"""Builds the message of each row of a change frame.

In every envelope, a row that a processor marked `raw_payload` becomes just its `after` image, or
`null`; an image that is a JSON string becomes its text, without quotes. Raises `UnsupportedEvent`
if the texts need more than 2 GiB.
"""


def native_envelope(origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return the native event of each row; see `Envelope`."""
    return _messages(frame, _native(origin, frame))


def debezium_envelope(origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return each row's native event as a Debezium payload, with a null schema; see `Envelope`."""
    return _messages(frame, ['{"schema":null,"payload":', *_native(origin, frame), "}"])


def cloudevents_envelope(
    type_prefix: str, origin: EventOrigin, frame: pa.RecordBatch
) -> pa.StringArray:
    """Return the CloudEvent of each row; see `Envelope`.

    Args:
        type_prefix: The beginning of the events' `type`, without the dot.
        origin: Where the events come from.
        frame: The rows.
    """
    table = _full_table(frame)
    ddl = _is_op(frame, "ddl")
    statement = values_of(frame.column("ddl")) if ddl.any() else None
    pieces: list[Piece] = [
        '{"specversion":"1.0"', Optional(',"id":"', values_of(frame.column("event_id"))),
        f'","source":"deltaforge/{_escaped(origin.name)}/', *table,
        f'","type":"{_escaped(type_prefix)}.', Optional("", _happened(frame)),
        Optional('","time":"', times(frame.column("ts_us"))),
        '","datacontenttype":"application/json","subject":"', *table,
        '","data":{"before":', Optional("", values_of(frame.column("before")), "", "null"),
        ',"after":', Optional("", values_of(frame.column("after")), "", "null"),
        Optional(',"op":"', wire_op(frame), '"'),
        Optional(',"ddl":', None if statement is None else statement.where(ddl)),
        "}}",
    ]  # fmt: skip
    return _messages(frame, pieces)


def _messages(frame: pa.RecordBatch, pieces: Sequence[Piece]) -> pa.StringArray:
    """Return the events built from `pieces`, or the `after` image for raw payloads."""
    events = concat(frame.num_rows, pieces)
    raw = frame.column("raw_payload")
    if not pc.any(raw).as_py():
        return events
    chosen: pa.StringArray = pc.if_else(raw, raw_payloads(frame), events)
    return chosen


def raw_payloads(frame: pa.RecordBatch) -> pa.StringArray:
    """Return the messages of rows that a processor marked `raw_payload`; others have no meaning."""
    after = cast("pa.StringArray", frame.column("after").fill_null("null"))
    texts = np.flatnonzero(pc.and_(frame.column("raw_payload"), pc.starts_with(after, '"')))
    if texts.size:
        values = cast("list[str]", after.to_pylist())
        for row in texts.tolist():
            values[row] = _unquoted(values[row])
        after = pa.array(values, pa.string())
    return after


def _unquoted(string: str) -> str:
    """Return the text of a JSON string, or the string itself if UTF-8 cannot encode its text."""
    text: str = json.loads(string)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return string
    return text


def _native(origin: EventOrigin, frame: pa.RecordBatch) -> list[Piece]:
    ts_ms = decimals(frame.column("ts_us"), 1000)
    return [
        '{"before":', Optional("", values_of(frame.column("before")), "", "null"),
        ',"after":', Optional("", values_of(frame.column("after")), "", "null"),
        f',"source":{{"version":{_json(origin.version)},"connector":{_json(origin.connector)}',
        f',"name":{_json(origin.name)}', Optional(',"ts_ms":', ts_ms),
        *(
            Optional(f',"{name}":', _names(frame.column(name)))
            for name in ("db", "schema", "table")
        ),
        *_position_pieces(origin, frame),
        Optional('},"op":"', wire_op(frame)),
        Optional('","ts_ms":', ts_ms),
        Optional(',"transaction":{"id":"', values_of(frame.column("tx_id")), '"}'),
        Optional(',"event_id":"', values_of(frame.column("event_id"))),
        f'","tenant_id":{_json(origin.tenant)}',
        Optional(',"schema_version":"', values_of(frame.column("schema_version")), '"'),
        Optional(',"schema_sequence":', decimals(frame.column("schema_sequence"))),
        Optional(',"ddl":', values_of(frame.column("ddl"))),
        Optional(',"tags":', values_of(frame.column("tags"))),
        Optional(',"synthetic":', _names(frame.column("synthetic"))),
        Optional(',"tx_end":', flags(frame.column("tx_end").to_numpy(zero_copy_only=False))),
        "}",
    ]  # fmt: skip


def _position_pieces(origin: EventOrigin, frame: pa.RecordBatch) -> list[Piece]:
    """Return the pieces of each row's log position, or of the mark of a snapshot row."""
    snapshot = is_snapshot(frame)
    pieces = [_position_piece(field, frame) for field in origin.position_fields]
    if not snapshot.any():
        return [*pieces]
    streamed: list[Piece] = [
        Optional(
            piece.before,
            None if piece.values is None else piece.values.where(~snapshot),
            piece.after,
        )
        for piece in pieces
    ]
    return [Optional(',"snapshot":"', flags(snapshot), '"'), *streamed]


def wire_op(frame: pa.RecordBatch) -> Values | None:
    """Return the `op` of each event: that of the frame, except `r` for DDL."""
    return _mapped(frame.column("op"), lambda op: "r" if op == "ddl" else op)


def is_snapshot(frame: pa.RecordBatch) -> Mask:
    """Return a mask of the rows that were read by a snapshot, which have no log position."""
    return _is_op(frame, "r")


def _is_op(frame: pa.RecordBatch, op: str) -> Mask:
    mask = pc.equal(frame.column("op"), pa.scalar(op))
    return cast("Mask", mask.to_numpy(zero_copy_only=False))


_VERBS = {
    "c": "created",
    "u": "updated",
    "d": "deleted",
    "r": "snapshot",
    "ddl": "snapshot",
    "t": "truncated",
}


def _happened(frame: pa.RecordBatch) -> Values | None:
    """Return the last part of each CloudEvent's type: `created`, `updated` and so on."""
    return _mapped(frame.column("op"), _VERBS.__getitem__)


def _full_table(frame: pa.RecordBatch) -> list[Piece]:
    """Return the pieces of `schema.table`, or `db.table`, escaped for use in a JSON string."""
    schema, db = frame.column("schema"), _mapped(frame.column("db"), _escaped)
    if schema.null_count < len(schema) and db is not None:
        db = (
            db.where(schema.is_null().to_numpy(zero_copy_only=False)) if schema.null_count else None
        )
    return [
        Optional("", _mapped(schema, _escaped)),
        Optional("", db),
        Optional(".", _mapped(frame.column("table"), _escaped)),
    ]


def _position_piece(field: PositionField, frame: pa.RecordBatch) -> Optional:
    if field.column is not None and field.form == "string":
        return Optional(f',"{field.name}":', _names(frame.column(field.column)))
    quote = '"' if field.form in {"plain", "quoted number", "lsn"} else ""
    return Optional(f',"{field.name}":{quote}', position_values(field, frame), quote)


def position_values(field: PositionField, frame: pa.RecordBatch) -> Values | None:
    """Return the text of a position field for each row, without quotes and not escaped."""
    if field.column is None:
        return None if field.constant is None else constant(field.constant)
    column = frame.column(field.column)
    match field.form:
        case "lsn":
            return lsns(column)
        case "number" | "quoted number":
            return decimals(column)
        case _:
            return values_of(column)


def _names(column: pa.Array[Any]) -> Values | None:
    """Return names as JSON strings."""
    return _mapped(column, _json)


def _mapped(column: pa.Array[Any], text: Callable[[str], str]) -> Values | None:
    """Apply `text` to a dictionary column, calling it once for each distinct name."""
    assert isinstance(column, pa.DictionaryArray)
    texts = [None if name is None else text(name) for name in column.dictionary.to_pylist()]
    return values_of(pa.DictionaryArray.from_arrays(column.indices, pa.array(texts, pa.string())))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return text escaped for use inside a JSON string."""
    return _json(text)[1:-1]
