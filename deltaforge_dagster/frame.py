"""The change frame: one row per change, in log order; the journal's schema and Spark's input.

A source fills every column of `CAPTURED`; the run numbers the rows (`segment`, `ordinal`) when it
writes them into a segment. `synthetic` was added later than the other columns: in files without it,
it is read as null. Row images are JSON text, written once by capture and not parsed again on the
way to a sink unless a processor needs it. Every source uses the same columns:

=================  ==========================================================================
segment, ordinal   place in the journal; ordinals of a segment are 0, 1, 2 ... without gaps
op                 `c` insert, `u` update, `d` delete, `r` snapshot read, `t` truncate,
                   `ddl` any other statement that changes a schema (`r` on the wire, see below)
ts_us              event time, microseconds since 1970 UTC
db, schema, table  names as in the event's `source` block (`schema` is null if a source has none)
before, after      row images, JSON objects as text, or null
key                primary key (or replica identity) as a JSON object, or null without one
file, pos, row     position in the log: binlog file and end position, or an LSN in `pos`;
                   `row` counts the changes of one transaction from 0
tx_id              GTID or xid as text
tx_end             true on the last change of its transaction
schema_version     fingerprint of the table version that the row was decoded with
schema_sequence    the registry's global sequence of that version
event_id           UUID, a function of the change's log position: the same each time it is read
ddl                payload of a DDL or truncate event, a JSON object as text
topic .. raw_payload  routing set by processors; `headers` is a JSON object as text
tags               JSON array of strings as text
synthetic          id of the processor that created the event; null for a captured event
=================  ==========================================================================

A truncate is one row per table, in the statement's order, with that table's names; a DDL statement
is one row of the table `_ddl`. Neither has images or a key. Events have no separate op for DDL:
they have `r`, like a snapshot row, but with their log position. A logical message is an insert
into the reserved schema `__wal_message`, with its prefix as the table's name.
"""

from __future__ import annotations

import pyarrow as pa

_NAME = pa.dictionary(pa.int32(), pa.string())

CAPTURED = pa.schema(
    [
        pa.field("op", _NAME, nullable=False),
        pa.field("ts_us", pa.int64(), nullable=False),
        pa.field("db", _NAME, nullable=False),
        pa.field("schema", _NAME),
        pa.field("table", _NAME, nullable=False),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("key", pa.string()),
        pa.field("file", _NAME),
        pa.field("pos", pa.int64()),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("tx_id", _NAME),
        pa.field("tx_end", pa.bool_(), nullable=False),
        pa.field("schema_version", _NAME),
        pa.field("schema_sequence", pa.int64()),
        pa.field("event_id", pa.string(), nullable=False),
        pa.field("ddl", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("route_key", pa.string()),
        pa.field("headers", pa.string()),
        pa.field("raw_payload", pa.bool_(), nullable=False),
        pa.field("tags", pa.string()),
    ]
)
"""The columns that a source fills: the change frame without journal position and `synthetic`."""

PROCESSED = pa.schema([*CAPTURED, pa.field("synthetic", _NAME)])
"""The columns that a processor chain fills: the change frame without the journal position."""

FRAME = pa.schema(
    [
        pa.field("segment", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        *PROCESSED,
    ]
)
"""The change frame, and the Parquet schema of a segment file."""
