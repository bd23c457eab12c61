"""Rows of the change frame for tests, and a plain Python reference for their events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from deltaforge_dagster import __version__
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from deltaforge_dagster.sources.registry import PositionField, source_types

Row = Mapping[str, Any]

SERVER_ID = 7
"""That of the reader of a MySQL server."""


def position_fields(connector: str) -> tuple[PositionField, ...]:
    """Return the position fields of the source whose events have this connector."""
    (kind,) = (one for one in source_types().values() if one.connector == connector)
    fields = kind.position_fields(SimpleNamespace(id="orders-db"))
    return tuple(
        one if one.constant is None else replace(one, constant=str(SERVER_ID)) for one in fields
    )


PLAIN: Row = {
    "segment": 1,
    "ordinal": 0,
    "op": "c",
    "ts_us": 1_700_000_000_123_456,
    "db": "shop",
    "schema": "public",
    "table": "orders",
    "before": None,
    "after": '{"id":1}',
    "key": '{"id":1}',
    "file": None,
    "pos": 0x16B6C50,
    "row": 0,
    "tx_id": "731",
    "tx_end": False,
    "schema_version": "sha256:00ff",
    "schema_sequence": 3,
    "event_id": "0192f0c1-0000-7000-8000-000000000001",
    "ddl": None,
    "topic": None,
    "route_key": None,
    "headers": None,
    "raw_payload": False,
    "tags": None,
    "synthetic": None,
}
"""An ordinary PostgreSQL insert; tests change the columns that they are about."""


def row(**changed: Any) -> Row:
    """Return `PLAIN` with some columns changed."""
    return {**PLAIN, **changed}


def table(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a change frame."""
    return pa.Table.from_pylist([dict(one) for one in rows], schema=FRAME)


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a batch of the change frame."""
    (only,) = table(rows).combine_chunks().to_batches()
    return only


def dumps(value: Any) -> str:
    """Serialize JSON as in the change frame: compact, without escaping non-ASCII text."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def event(row: Row, origin: EventOrigin) -> dict[str, Any]:  # noqa: C901 - one rule per key
    """Return the native event of a row, derived from the event model and not from the product's code."""
    source: dict[str, Any] = {
        "version": f"deltaforge-{__version__}",
        "connector": origin.connector,
        "name": origin.name,
        "ts_ms": row["ts_us"] // 1000,
        "db": row["db"],
    }
    if row["schema"] is not None:
        source["schema"] = row["schema"]
    source["table"] = row["table"]
    if row["op"] == "r":
        source["snapshot"] = "true"
    elif origin.connector == "postgresql":
        if row["pos"] is not None:
            source["lsn"] = format_lsn(row["pos"])
        if row["tx_id"] is not None:
            source["txId"] = int(row["tx_id"])
    else:
        places = {
            "server_id": SERVER_ID,
            "gtid": row["tx_id"],
            "file": row["file"],
            "pos": row["pos"],
        }
        source |= {key: value for key, value in places.items() if value is not None}
    whole: dict[str, Any] = {
        "before": None if row["before"] is None else json.loads(row["before"]),
        "after": None if row["after"] is None else json.loads(row["after"]),
        "source": source,
        "op": "r" if row["op"] == "ddl" else row["op"],
        "ts_ms": row["ts_us"] // 1000,
    }
    if row["tx_id"] is not None:
        whole["transaction"] = {"id": row["tx_id"]}
    whole["event_id"] = row["event_id"]
    whole["tenant_id"] = origin.tenant
    for name in ("schema_version", "schema_sequence"):
        if row[name] is not None:
            whole[name] = row[name]
    for name in ("ddl", "tags", "synthetic"):
        if row[name] is not None:
            whole[name] = row[name] if name == "synthetic" else json.loads(row[name])
    if row["tx_end"]:
        whole["tx_end"] = True
    return whole


def debezium(row: Row, origin: EventOrigin) -> dict[str, Any]:
    """Return the debezium envelope of a row, derived from the event model."""
    return {"schema": None, "payload": event(row, origin)}


def cloudevent(row: Row, origin: EventOrigin, type_prefix: str) -> dict[str, Any]:
    """Return the CloudEvent of a row, derived from the event model."""
    native = event(row, origin)
    table = f"{row['db'] if row['schema'] is None else row['schema']}.{row['table']}"
    happened = {"c": "created", "u": "updated", "d": "deleted", "r": "snapshot", "t": "truncated"}
    moment = datetime.fromtimestamp(native["ts_ms"] // 1000, UTC).replace(tzinfo=None)
    data = {"before": native["before"], "after": native["after"], "op": native["op"]}
    if row["op"] == "ddl" and row["ddl"] is not None:
        data["ddl"] = native["ddl"]
    return {
        "specversion": "1.0",
        "id": row["event_id"],
        "source": f"deltaforge/{origin.name}/{table}",
        "type": f"{type_prefix}.{happened[native['op']]}",
        "time": f"{moment.isoformat()}.{native['ts_ms'] % 1000:03}Z",
        "datacontenttype": "application/json",
        "subject": table,
        "data": data,
    }


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.one_of(
    st.sampled_from(
        ["orders", 'quo"ted', "back\\slash", "tab\tbell\x07", "naïve 名 😀", "\x1f", ""]
    ),
    texts,
)
values = st.one_of(texts, st.integers(-(2**70), 2**70), st.booleans(), st.none())
images = st.dictionaries(names, values | st.dictionaries(names, values, max_size=2), max_size=4)
image_texts = st.none() | images.map(dumps)
rows = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["c", "u", "d", "r", "t", "ddl"]),
        "ts_us": st.integers(0, 2**52),
        "db": names,
        "schema": st.none() | names,
        "table": names,
        "before": image_texts,
        "after": image_texts,
        "file": st.none() | names,
        "pos": st.none() | st.integers(0, 2**63 - 1),
        "tx_id": st.none() | st.integers(0, 2**32).map(str),
        "tx_end": st.booleans(),
        "schema_version": st.none() | st.just("sha256:ab12"),
        "schema_sequence": st.none() | st.integers(0, 2**31),
        "event_id": st.uuids().map(str),
        "ddl": st.none() | st.builds(lambda one: dumps({"sql": one}), texts),
        "topic": st.none() | names,
        "route_key": st.none() | names,
        "synthetic": st.none() | names,
        "tags": st.none() | st.lists(texts, max_size=3).map(dumps),
    }
).map(lambda one: row(**one))
