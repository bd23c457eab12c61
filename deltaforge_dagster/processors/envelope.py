"""The native event as JSON text, by column expressions over the change frame.

Row images, DDL payloads and tags are JSON text in the frame already, so an envelope is nothing but
concatenation: no expression parses or writes them again. What comes from elsewhere as plain text
(names of databases, schemas, tables, binlog files) is escaped; nearly always there is nothing to
escape, and one look at a row's names says so. Key order and presence::

    before after source{version connector name ts_ms db [schema] table [snapshot] [position...]}
    op ts_ms [transaction{id}] event_id tenant_id [schema_version] [schema_sequence] [ddl] [tags]
    [tx_end]

Keys in brackets are absent when unset, the others are there with `null`. The position keys are
`lsn`, `txId` for PostgreSQL and `server_id`, `gtid`, `file`, `pos` for MySQL; a snapshot row has
none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql.connect import functions as f

from deltaforge_dagster import __version__

_NULL = f.lit("null")
_NOTHING = f.lit("")
_SPECIAL = r'[\x00-\x1f"\\]'
"""What a JSON string must escape (RFC 8259, section 7)."""


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


def with_texts(frame: DataFrame) -> DataFrame:
    """Add what several expressions of this package use, so that it is computed once per row.

    `ts_ms` event time in milliseconds, as text; `lsn` position as `X/YYYYYYYY`.
    """
    position = f.col("pos")
    return frame.withColumns(
        {
            "ts_ms": f.expr("cast(ts_us div 1000 as string)"),
            "lsn": f.concat(
                f.hex(f.shiftright(position, 32)),
                f.lit("/"),
                f.lpad(f.hex(position.bitwiseAND(f.lit(0xFFFFFFFF))), 8, "0"),
            ),
        }
    )


def native_envelope(origin: Origin) -> Column:
    """Return the native event as JSON text, over a frame that `with_texts` completed.

    A row that a processor marked `raw_payload` becomes its `after` image alone, or `null`.
    """
    event = f.concat(
        f.lit('{"before":'), f.coalesce(f.col("before"), _NULL),
        f.lit(',"after":'), f.coalesce(f.col("after"), _NULL),
        f.lit(f',"source":{{"version":{_json(origin.version)},"connector":{_json(origin.connector)}'
              f',"name":{_json(origin.name)},"ts_ms":'), f.col("ts_ms"),
        f.lit(","), _names("db", "schema", "table"),
        f.when(f.col("op") == "r", f.lit(',"snapshot":"true"')).otherwise(
            f.concat(*_POSITIONS[origin.connector](origin))
        ),
        f.lit('},"op":"'), f.col("op"),
        f.lit('","ts_ms":'), f.col("ts_ms"),
        _optional(',"transaction":{"id":"', f.col("tx_id"), '"}'),
        f.lit(',"event_id":"'), f.col("event_id"),
        f.lit(f'","tenant_id":{_json(origin.tenant)}'),
        _optional(',"schema_version":"', f.col("schema_version"), '"'),
        _optional(',"schema_sequence":', f.col("schema_sequence").cast("string")),
        _optional(',"ddl":', f.col("ddl")),
        _optional(',"tags":', f.col("tags")),
        f.when(f.col("tx_end"), f.lit(',"tx_end":true}')).otherwise(f.lit("}")),
    )  # fmt: skip
    raw = f.coalesce(f.col("after"), _NULL)
    return f.when(f.col("raw_payload"), raw).otherwise(event)


def _postgres_position(_: Origin) -> list[Column]:
    return [_optional(',"lsn":"', f.col("lsn"), '"'), _optional(',"txId":', f.col("tx_id"))]


def _mysql_position(origin: Origin) -> list[Column]:
    return [
        f.lit("" if origin.server_id is None else f',"server_id":{origin.server_id}'),
        _optional(',"gtid":"', f.col("tx_id"), '"'),
        _optional(",", f.when(f.col("file").isNotNull(), _names("file"))),
        _optional(',"pos":', f.col("pos").cast("string")),
    ]


_POSITIONS: Mapping[str, Callable[[Origin], list[Column]]] = {
    "postgresql": _postgres_position,
    "mysql": _mysql_position,
}


def _optional(before: str, value: Column, after: str = "") -> Column:
    """Return the key with its value, or nothing where the value is null."""
    return f.coalesce(f.concat(f.lit(before), value, f.lit(after)), _NOTHING)


def _names(first: str, *others: str) -> Column:
    """Return `"first":"...","other":"..."` for columns of names; a null column is left out.

    The first must not be null. `to_json` escapes, and would cost as much as all the rest together
    if every row went through it.
    """
    plain = f.concat(
        f.lit(f'"{first}":"'), f.col(first), f.lit('"'),
        *(_optional(f',"{name}":"', f.col(name), '"') for name in others),
    )  # fmt: skip
    written = f.to_json(f.struct(*(f.col(name) for name in (first, *others))))
    escaped = f.substring(written, f.lit(2), f.length(written) - 2)
    text = f.concat(*(f.coalesce(f.col(name), _NOTHING) for name in (first, *others)))
    return f.when(text.rlike(_SPECIAL), escaped).otherwise(plain)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
