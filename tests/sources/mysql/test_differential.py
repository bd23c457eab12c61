"""The same rows, read three ways: by our decoder, by a snapshot, and by the package mysql-replication.

What the three say is compared for tables of generated columns and values. A snapshot has to give the
same text to the byte. mysql-replication gives Python values; where it is known to be wrong, or to
say less, its values are left out, each case by a line of `_peers_value`.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.testing.sources import take, whole
from tests.chance import examples
from tests.sources.mysql.bench import MysqlBench
from tests.sources.mysql.sql_columns import SqlColumn, columns

pytestmark = [
    pytest.mark.mysql,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pymysql"),
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcfromtimestamp:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'db' is deprecated"),
]

SETTINGS = settings(
    max_examples=examples(25),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a smaller example takes minutes to find
    report_multiple_bugs=False,
)
_OTHER = object()
"""In place of a value about which mysql-replication is known to be wrong."""


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """An empty database whose log describes its tables."""
    with MysqlBench(mysql_dsn) as made:
        made.run("SET time_zone = '+00:00'", "SET sql_mode = ''", "SET NAMES utf8mb4")
        made.run("SET GLOBAL binlog_row_metadata = FULL")
        yield made
        made.run("SET GLOBAL binlog_row_metadata = MINIMAL")


def selected(bench: MysqlBench, table: str, options: ValueOptions | None = None) -> list[str]:
    """Return the rows of a table, in the order of its key, as a snapshot reads them."""
    config = bench.config(tables=(f"{bench.database}.{table}",))
    snapshots = MysqlSource(config, "selected", options).snapshots()
    (chunk,) = snapshots.plan(None, 1000)
    with snapshots.reader() as reader:
        batches = list(reader.read(chunk, snapshots.watermark()).batches)
    rows = pa.Table.from_batches(batches).to_pylist()
    assert [row["key"] for row in rows] == [f'{{"id":{n}}}' for n in range(len(rows))]
    return [row["after"] for row in rows]


def peers_rows(bench: MysqlBench, table: str, start: BinlogPosition) -> list[dict[str, Any]]:
    """Return the newest image of every row that mysql-replication reads from the log."""
    parts = urlsplit(bench.dsn)
    stream = BinLogStreamReader(
        connection_settings={
            "host": parts.hostname,
            "port": parts.port,
            "user": parts.username,
            "password": unquote(parts.password or ""),
        },
        server_id=4_123_456_789,
        only_events=[WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent],
        only_schemas=[bench.database],
        only_tables=[table],
        log_file=start.file,
        log_pos=start.pos,
        resume_stream=True,
        ignore_decode_errors=True,
    )
    found: dict[int, dict[str, Any]] = {}
    try:
        for event in stream:
            for row in event.rows:
                values = row.get("values") or row["after_values"]
                found[values["id"]] = values
    finally:
        stream.close()
    return [found[key] for key in sorted(found)]


@SETTINGS
@given(st.lists(columns, min_size=1, max_size=12), st.data())
def test_three_readers_agree(
    bench: MysqlBench, drawn: list[SqlColumn], data: st.DataObject
) -> None:
    """Generated tables and values: log, snapshot and mysql-replication say the same."""
    start = make_table(bench, drawn, data)
    count = len(bench.rows("SELECT id FROM v"))

    source = bench.source(tables=(f"{bench.database}.v",))
    taken = take(bench, start, whole(count), source=source)
    source.close()
    decoded = [str(row["after"]) for row in taken.rows]

    assert decoded == selected(bench, "v")
    for text, peer in zip(decoded, peers_rows(bench, "v", start), strict=True):
        for place, (name, value) in enumerate(json.loads(text).items()):
            declaration = "int" if name == "id" else drawn[place - 1].declaration
            expected = _peers_value(declaration, value, peer[name])
            assert expected is _OTHER or expected == value, (declaration, peer[name])


@settings(SETTINGS, max_examples=examples(8))
@given(st.lists(columns, min_size=1, max_size=12), st.data())
def test_other_forms(bench: MysqlBench, drawn: list[SqlColumn], data: st.DataObject) -> None:
    """With numbers for ENUM, SET and TIMESTAMP, log and snapshot agree, too, and with the labels."""
    options = ValueOptions(
        mysql_enum="index", mysql_set="bits", mysql_timestamp="micros", mysql_binary="text"
    )
    start = make_table(bench, drawn, data)
    count = len(bench.rows("SELECT id FROM v"))

    source = MysqlSource(bench.config(tables=(f"{bench.database}.v",)), "other-forms", options)
    taken = take(bench, start, whole(count), source=source)
    source.close()
    decoded = [str(row["after"]) for row in taken.rows]

    assert decoded == selected(bench, "v", options)
    for text, usual in zip(decoded, selected(bench, "v"), strict=True):
        for place, (name, value) in enumerate(json.loads(text).items()):
            declaration = "int" if name == "id" else drawn[place - 1].declaration
            if value is not None and declaration.startswith(("enum", "set", "timestamp")):
                assert isinstance(value, int)
            elif isinstance(value, str) and declaration.startswith(("binary", "varbinary")):
                content = base64.b64encode(value.encode()).decode()
                assert json.loads(usual)[name] == {"_base64": content}
            else:
                assert value == json.loads(usual)[name]


def make_table(bench: MysqlBench, drawn: list[SqlColumn], data: st.DataObject) -> BinlogPosition:
    """Make the table `v` with these columns and a few rows; return where the rows begin."""
    declared = ", ".join(f"c{i} {column.declaration}" for i, column in enumerate(drawn))
    bench.run("DROP TABLE IF EXISTS v", f"CREATE TABLE v (id int PRIMARY KEY, {declared})")
    start = bench.source().ensure_start()
    rows = data.draw(
        st.lists(
            st.tuples(*(st.just("NULL") | column.literals for column in drawn)),
            min_size=1,
            max_size=4,
        )
    )
    values = ", ".join(f"({i}, {', '.join(row)})" for i, row in enumerate(rows))
    bench.execute(f"INSERT INTO v VALUES {values}")
    return start


def _peers_value(declaration: str, ours: Any, theirs: Any) -> Any:  # noqa: C901, PLR0911, PLR0912 - one case per type
    """Return what mysql-replication says in our form, `_OTHER` where it is no measure."""
    type_ = re.match(r"[a-z]+", declaration)
    assert type_
    name = type_[0]
    if theirs is None and ours is not None:
        # It has no zero dates, no parts of dates, and no empty SET.
        assert name in {"date", "datetime", "set", "json"}
        return _OTHER
    if theirs is None:
        return None
    if name in {"enum", "set"} and "utf8mb4" not in declaration:
        return _OTHER  # it takes labels of any character set for UTF-8
    match name:
        case "decimal":
            return ours if Decimal(ours) == theirs else theirs
        case "float":
            # It has the DOUBLE of the same value.
            return ours if math.isclose(theirs, ours, rel_tol=1e-6, abs_tol=1e-45) else theirs
        case "bit":
            return int(theirs, 2)
        case "year":
            return 0 if theirs == 1900 else theirs  # its year of 0
        case "date":
            assert isinstance(theirs, date)
            return theirs.isoformat()
        case "datetime" | "timestamp":
            assert isinstance(theirs, datetime)
            if ours.startswith("0000"):
                return _OTHER  # it has 1970
            text = theirs.strftime("%H:%M:%S.%f")
            day = f"{theirs.year:04}-{theirs.month:02}-{theirs.day:02}"
            return f"{day} {text}" if name == "datetime" else f"{day}T{text}Z"
        case "time":
            assert isinstance(theirs, timedelta)
            if ours.startswith("-"):
                return _OTHER  # it takes the fraction of a negative time for a positive one
            micros = theirs // timedelta(microseconds=1)
            seconds, rest = divmod(micros, 1_000_000)
            return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest:06}"
        case "set":
            return ours if theirs == set(ours.split(",")) else theirs
        case "enum":
            return theirs
        case "char" | "varchar" | "tinytext" | "text" | "longtext":
            charset = declaration.rpartition(" ")[2]
            return theirs if charset in {"utf8mb4", "utf8mb3", "ascii"} else _OTHER  # other codecs
        case "binary" | "varbinary" | "tinyblob" | "longblob":
            content = theirs if isinstance(theirs, bytes) else None
            if content is None:
                return _OTHER  # bytes as text
            if name == "binary":
                content = content.ljust(30, b"\0")  # it has lost the zero bytes
            return {"_base64": base64.b64encode(content).decode()}
        case "geometry":
            return {"_base64": base64.b64encode(theirs).decode()}
        case "json":
            return _OTHER if "_opaque" in repr(ours) else _document(ours, theirs)
        case _:
            return theirs


def _document(ours: Any, theirs: Any) -> Any:
    """Return a document of mysql-replication with text for bytes; `_OTHER` for column types in it."""
    if isinstance(theirs, bytes):
        return theirs.decode()
    if isinstance(theirs, list):
        parts = [_document(None, part) for part in theirs]
        return _OTHER if _OTHER in parts else parts
    if isinstance(theirs, dict):
        members = {key.decode(): _document(None, part) for key, part in theirs.items()}
        return _OTHER if _OTHER in members.values() else members
    if isinstance(theirs, (Decimal, date, datetime, timedelta)):
        return _OTHER
    return theirs
