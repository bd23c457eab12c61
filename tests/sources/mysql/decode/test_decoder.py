from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.mysql.decode.rows import write_changes, write_event_ids
from deltaforge_dagster.sources.mysql.decode.scan import commit, pass_event, scan
from deltaforge_dagster.sources.mysql.decode.scan_rows import find_table
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import GtidRun
from deltaforge_dagster.sources.mysql.events.table_map import CatalogColumn, CatalogTable
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableContext
from deltaforge_dagster.sources.mysql.warm import warm
from deltaforge_lab.synthetic import mysql_events as samples
from deltaforge_lab.synthetic.mysql_events import (
    FILE,
    SID,
    SyntheticColumn,
    SyntheticLog,
    bitmap,
    packed,
)
from tests.chance import examples
from tests.sources.mysql.reference import (
    Catalog,
    NoLog,
    Place,
    Progress,
    Reference,
    Registry,
    Table,
)
from tests.sources.mysql.strategies import Made, streams

TABLE = 108
USERS = (
    SyntheticColumn("id", 8, nullable=False),
    SyntheticColumn("name", 15, b"\xff\0", collation=255),
)
DESCRIPTION = samples.description("shop", "users", USERS, (0,))


def make_decoder(**changed: Any) -> MysqlDecoder:
    """Return a decoder that captures everything, with some arguments changed."""
    arguments: dict[str, Any] = {
        "source_id": "shop-db",
        "progress": Progress(),
        "registry": Registry(),
        "catalog": Catalog(),
        "captures": lambda _database, _table: True,
        "prepared": NoLog(),
    } | changed
    names = {field.name for field in fields(MysqlTableContext)} & arguments.keys()
    context = MysqlTableContext(**{name: arguments.pop(name) for name in names})
    return MysqlDecoder(context, **arguments)


def decode(
    stream: bytes, cuts: tuple[int, ...] = (), **changed: Any
) -> tuple[list[ChangeBatch], DeltaforgeError | None]:
    """Feed the stream in the pieces that `cuts` makes, as the socket part does."""
    decoder = make_decoder(**changed)
    batches: list[ChangeBatch] = []
    tail, at = b"", 0
    for cut in (*sorted(cuts), len(stream)):
        piece = bytearray(tail + stream[at:cut])
        decoded = decoder.feed(piece, len(piece))
        assert 0 <= decoded.consumed <= len(piece)
        batches += decoded.batches
        while decoded.again:
            piece = piece[decoded.consumed :]
            decoded = decoder.feed(piece, len(piece))
            batches += decoded.batches
        tail, at = bytes(piece[decoded.consumed :]), cut
        piece[:] = bytes(len(piece))  # what came out must not look into the buffer any more
        if decoded.error or decoded.foreign:
            return batches, decoded.error
    assert not tail
    return batches, None


def rows_of(batches: list[ChangeBatch]) -> list[dict[str, Any]]:
    """Return all rows."""
    return [row for batch in batches if batch.rows for row in batch.rows.to_pylist()]


def _same_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose images are compared as lists of pairs: 1e+22 is 1e22, 1 is 1.0."""
    images = {
        name: row[name]
        and json.loads(row[name], object_pairs_hook=list, parse_int=_number, parse_float=_number)
        for name in ("before", "after", "key")
    }
    return row | images


def _number(text: str) -> tuple[str, float | int]:
    integer = text.lstrip("-").isdigit()
    return ("number", int(text) if integer else float(text))


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(60))
@given(streams(), st.data())
def test_decodes_like_the_reference(made: Made, data: st.DataObject) -> None:
    """Any valid stream, cut anywhere into pieces, gives what the plain Python decoder reads."""
    cuts = data.draw(st.lists(st.integers(0, len(made.stream)), max_size=6))
    batches, error = decode(made.stream, tuple(cuts), captures=lambda db, _table: db == "shop")

    reference = Reference("shop-db", made.tables).decode(made.stream)
    rows = rows_of(batches)
    assert error is None
    compared = list(reference.rows[0]) if reference.rows else []
    assert [_same_numbers(row) for row in reference.rows] == [
        _same_numbers({name: row[name] for name in compared}) for row in rows
    ]
    for batch in batches:
        if batch.rows:
            batch.rows.validate(full=True)


def image(number: int, name: str | None = "x") -> bytes:
    """Return the image of a row of `users`."""
    text = b"" if name is None else bytes([len(name.encode())]) + name.encode()
    return bitmap([False, name is None]) + number.to_bytes(8, "little", signed=True) + text


def inserts(log: SyntheticLog, *numbers: int, table: int = TABLE) -> SyntheticLog:
    """Add an event that inserts rows into `users`."""
    content = packed(2) + bitmap([True, True]) + b"".join(map(image, numbers))
    return log.rows(30, table, content)


def transaction(log: SyntheticLog, number: int, *rows: int) -> SyntheticLog:
    """Add a transaction that inserts rows into `users`."""
    log.begin(number, 1_000_000 * number).table(TABLE, DESCRIPTION)
    return inserts(log, *rows).commit()


def test_a_transaction_ends_with_its_last_change() -> None:
    """`tx_end` is on the last change only, and a position comes only with a whole transaction."""
    log = transaction(SyntheticLog().start(), 1, 1, 2)
    log.begin(2).table(TABLE, DESCRIPTION)
    inserts(inserts(log, 3), 4)
    still_open, _ = decode(log.stream())
    end = log.pos
    log.commit()
    batches, _ = decode(log.stream())

    assert [row["tx_end"] for row in rows_of(still_open)] == [False, True, False]
    assert still_open[-1].end is None
    assert [row["tx_end"] for row in rows_of(batches)] == [False, True, False, True]
    assert [row["tx_id"] for row in rows_of(batches)] == [
        f"{uuid.UUID(bytes=SID)}:{n}" for n in (1, 1, 2, 2)
    ]
    assert [row["row"] for row in rows_of(batches)] == [0, 1, 0, 1]
    assert batches[-1].end == Place(FILE, log.pos, 2)
    assert log.pos > end


def test_rows_of_an_open_transaction_come_without_an_end() -> None:
    """However large a transaction is, its rows are handed on as they come, but for the last one."""
    log = SyntheticLog().start().begin(1).table(TABLE, DESCRIPTION)
    decoder = make_decoder()
    seen = 0
    for first in range(0, 3000, 100):
        inserts(log, *range(first, first + 100))
        piece, log.parts = log.stream(), [b""]
        decoded = decoder.feed(piece, len(piece))
        assert decoded.consumed == len(piece)
        assert all(batch.end is None for batch in decoded.batches if batch.rows)
        seen += len(rows_of(list(decoded.batches)))
        assert seen == first + 99
    piece = log.commit().parts[-1]
    last = decoder.feed(piece, len(piece)).batches

    assert [(row["row"], row["tx_end"]) for row in rows_of(list(last))] == [(2999, True)]
    assert last[-1].end == Place(FILE, log.pos, 1)


def test_gtids_count_when_their_transaction_ends() -> None:
    """Numbers in a row are one run, a gap begins another, and an open transaction is not in it."""
    log = SyntheticLog().start()
    for number in (1, 2, 3, 7, 8):
        transaction(log, number, number)
    log.begin(9).table(TABLE, DESCRIPTION)
    inserts(log, 9)
    progress = Progress()
    decode(log.stream(), progress=progress)

    assert progress.runs == [GtidRun(SID, 1, 3), GtidRun(SID, 7, 8)]


def test_what_holds_no_change_is_progress() -> None:
    """Empty transactions, statements, tables that are not captured and files move the position."""
    catalog, progress = Catalog(), Progress()
    log = SyntheticLog().start().begin(1).commit().gtid(2).query("GRANT ALL ON *.* TO x", "")
    log.begin(3).table(TABLE, samples.description("other", "users", USERS))
    inserts(log, 1).commit()
    before = log.pos
    log.event(4, (4).to_bytes(8, "little") + b"binlog.000002").start("binlog.000002")
    batches, error = decode(
        log.stream(), catalog=catalog, progress=progress, captures=lambda db, _: db == "shop"
    )

    assert error is None
    assert rows_of(batches) == []
    assert catalog.statements == []
    assert Place(FILE, before, 3) in [batch.end for batch in batches]
    assert batches[-1].end == Place("binlog.000002", log.pos, 3)


def test_a_heartbeat_says_how_far_the_log_is_passed() -> None:
    """With GTIDs the server skips what we have, and says so by a heartbeat."""
    log = SyntheticLog().start()
    log.event(27, FILE.encode(), end=5000)
    batches, _ = decode(log.stream())

    assert batches[-1].end == Place(FILE, 5000)


def test_uncaptured_changes_are_counted() -> None:
    """`row` and the event ids of captured changes do not depend on which tables are captured."""
    log = SyntheticLog().start().begin(1).table(TABLE, DESCRIPTION)
    log.table(TABLE + 1, samples.description("shop", "orders", USERS, (0,)))
    inserts(inserts(inserts(log, 1, 2), 3, table=TABLE + 1), 4).commit()
    everything = rows_of(decode(log.stream())[0])
    some = rows_of(decode(log.stream(), captures=lambda _, table: table == "users")[0])

    assert [row["row"] for row in everything] == [0, 1, 2, 3]
    assert [(row["row"], row["event_id"]) for row in some] == [
        (row["row"], row["event_id"]) for row in everything if row["table"] == "users"
    ]


def test_event_ids_depend_on_the_gtid_alone() -> None:
    """A replica's log, with other positions and other times, gives the same ids."""
    here = transaction(SyntheticLog().start(), 5, 1, 2)
    there = transaction(transaction(SyntheticLog(clock=7).start(), 4, 9), 5, 1, 2)
    ids = [row["event_id"] for row in rows_of(decode(here.stream())[0])]
    others = [row["event_id"] for row in rows_of(decode(there.stream())[0])]
    elsewhere = rows_of(decode(here.stream(), source_id="other-db")[0])

    assert ids == others[1:]
    assert len(set(ids + others)) == 3
    assert not {row["event_id"] for row in elsewhere} & set(ids)


def test_positions_beyond_4_gib() -> None:
    """A file's position goes on where the header's 32 bits begin again."""
    log = SyntheticLog().start()
    log.pos = (1 << 32) - 200
    transaction(log, 1, 1, 2)
    batches, _ = decode(log.stream())

    assert log.pos > 1 << 32
    assert batches[-1].end == Place(FILE, log.pos, 1)
    assert rows_of(batches)[0]["pos"] == log.pos - 31


def test_an_event_in_several_packets() -> None:
    """An event of 16 MiB and more is put together, also when its last packet is empty."""
    column = (SyntheticColumn("v", 252, b"\4", collation=255),)
    for size in ((1 << 24) - 1 - 35 - 6, 1 << 24, (1 << 25) + 5):
        log = transaction(SyntheticLog().start(), 1, 1).begin(2)
        log.table(9, samples.description("shop", "t", column))
        content = packed(1) + b"\1\0" + size.to_bytes(4, "little") + b"x" * size
        log.rows(30, 9, content).commit()
        transaction(log, 3, 2)
        stream = log.stream()
        batches, error = decode(stream, (1000, 1 << 23, len(stream) - 300))

        assert error is None
        values = [json.loads(row["after"]) for row in rows_of(batches)]
        assert values[1] == {"v": "x" * size}
        assert [values[0]["id"], values[2]["id"]] == [1, 2]
        assert batches[-1].end == Place(FILE, log.pos, 3)


def test_log_bytes_add_up() -> None:
    """Every byte of the stream is counted once."""
    stream = samples.orders(500, rows_per_tx=30)
    batches, _ = decode(stream, (1000, 20_000, 30_000))
    pluralize = sum(batch.log_bytes for batch in batches)

    assert len(stream) - 200 <= pluralize <= len(stream)


def test_batches_have_the_frame_s_columns() -> None:
    """Every batch has the columns of the frame, and is valid Arrow."""
    tables = [batch.rows for batch in decode(samples.orders(50))[0] if batch.rows]

    assert tables[0].schema.equals(CAPTURED)
    tables[0].validate(full=True)
    assert tables[0].column("schema").null_count == len(tables[0])
    pa.Table.from_batches(tables).to_pandas()


def test_packets_that_are_no_events() -> None:
    """An error of the server and the end of the stream are left to the caller, who sees where."""
    log = transaction(SyntheticLog().start(), 1, 1)
    for content, name in [(b"\xff\xd4\x04#HY000gone", "ERR"), (b"\xfe\0\0\2\0", "EOF")]:
        stream = log.stream() + samples.packets(content)
        decoded = make_decoder().feed(stream, len(stream))

        assert (decoded.foreign, decoded.error) == (name, None)
        assert decoded.consumed == len(log.stream())
        assert len(rows_of(list(decoded.batches))) == 1


def test_the_catalog_names_what_the_log_leaves_out() -> None:
    """Without FULL metadata the catalog is asked, with the types of the log, and asked again."""
    fields = (*USERS, SyntheticColumn("mood", 254, b"\xf7\1"))
    columns = tuple(CatalogColumn(n, x) for n, x in [("a", ()), ("b", ()), ("c", ("sad", "gay"))])
    catalog = Catalog({"users": CatalogTable(columns, ("b",))})
    registry = Registry()
    bare = samples.description("shop", "users", fields, full=False)
    log = SyntheticLog().start()
    for number in (1, 3):
        log.begin(number).table(TABLE, bare)
        log.rows(30, TABLE, packed(3) + b"\7" + b"\0" + image(number)[1:] + b"\2").commit()
        log.gtid(number + 1).query("ALTER TABLE x ADD y int")
    batches, error = decode(log.stream(), catalog=catalog, registry=registry)

    assert error is None
    assert catalog.asked == [("shop", "users", ("bigint", "varchar(63)", "enum"))] * 2
    assert [row["after"] for row in rows_of(batches) if row["op"] == "c"] == [
        '{"a":1,"b":"x","c":"gay"}',
        '{"a":3,"b":"x","c":"gay"}',
    ]
    assert rows_of(batches)[0]["key"] == '{"b":"x"}'
    (schema, _) = registry.registered[0]
    assert [c.data_type for c in schema.columns] == ["bigint", "varchar(63)", "enum('sad','gay')"]
    assert len(registry.registered) == 1


def test_versions_are_registered_with_their_position() -> None:
    """A repeated description registers nothing; a changed one stamps the rows after it."""
    registry = Registry()
    log = transaction(transaction(SyntheticLog().start(), 1, 1), 2, 2).begin(3)
    wider = samples.description(
        "shop", "users", (*USERS, SyntheticColumn("w", 1, unsigned=True)), (0,)
    )
    log.table(TABLE + 1, wider)
    place = Place(FILE, log.pos, 2)
    log.rows(30, TABLE + 1, packed(3) + b"\7" + image(3) + b"\xff").commit()
    batches, _ = decode(log.stream(), registry=registry)

    assert [position for _, position in registry.registered][1] == place
    schema = registry.registered[1][0]
    assert [(c.name, c.data_type, c.nullable) for c in schema.columns] == [
        ("id", "bigint", False),
        ("name", "varchar(63)", True),
        ("w", "tinyint unsigned", True),
    ]
    assert schema.primary_key == ("id",)
    assert [row["schema_sequence"] for row in rows_of(batches)] == [1, 1, 2]
    assert rows_of(batches)[2]["after"] == '{"id":3,"name":"x","w":255}'


def test_an_error_is_returned_again() -> None:
    """A decoder that met an error decodes nothing more."""
    decoder = make_decoder()
    bad = SyntheticLog().start().event(200, b"?").stream()
    first = decoder.feed(bad, len(bad))
    good = transaction(SyntheticLog().start(), 1, 1).stream()
    again = decoder.feed(good, len(good))

    assert first.error is again.error is not None
    assert (again.consumed, again.batches) == (0, ())


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="plain Python is not compiled")
def test_warm_compiles_for_every_kind_of_buffer() -> None:
    """After `warm`, no run waits for the compiler: whatever holds the bytes, and all types in it."""
    kernels: list[Any] = [scan, write_changes, write_event_ids, find_table, commit, pass_event]
    warm()
    compiled = [len(kernel.compiled.signatures) for kernel in kernels]
    stream = every_type().stream
    for data in (stream, bytearray(stream), memoryview(bytearray(stream))):
        make_decoder().feed(data, len(stream))

    assert [len(kernel.compiled.signatures) for kernel in kernels] == compiled


def test_plain_python_decodes_the_same() -> None:
    """Without compilation the kernels are ordinary Python, with the same result to the byte."""
    program = (
        "import json\n"
        "from tests.sources.mysql.decode.test_decoder import *\n"
        "print(json.dumps(rows_of(decode(every_type().stream, (500, 1000))[0])))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    made = every_type()
    rows = rows_of(decode(made.stream)[0])

    assert json.loads(ran.stdout) == rows
    reference = Reference("shop-db", made.tables).decode(made.stream)
    assert [_same_numbers(row)["after"] for row in reference.rows] == [
        _same_numbers(row)["after"] for row in rows
    ]


def every_type() -> Made:
    """Return a stream with a value of each kind that the kernels write."""
    labels = ("a", 'b"', "ü")
    values = {
        SyntheticColumn("i8", 1): b"\x80",
        SyntheticColumn("u64", 8, unsigned=True): b"\xff" * 8,
        SyntheticColumn("i64", 8): bytes(7) + b"\x80",
        SyntheticColumn("dec", 246, b"\x0e\4"): bytes.fromhex("7e f2 04 c7 2d fb 2d"),
        SyntheticColumn("f", 4, b"\4"): b"\0\0\xc0\x3f",
        SyntheticColumn("d", 5, b"\x08"): bytes.fromhex("9a9999999999b93f"),
        SyntheticColumn("bit", 16, b"\0\x08"): b"\xff" * 8,
        SyntheticColumn("day", 10): bytes.fromhex("5dd00f"),
        SyntheticColumn("dt", 18, b"\6"): bytes.fromhex("99b8c431050a5bf5"),
        SyntheticColumn("ts", 17, b"\3"): bytes.fromhex("695735a51a7c"),
        SyntheticColumn("t", 19, b"\2"): bytes.fromhex("7f3747b2"),
        SyntheticColumn("year", 13): b"\x7e",
        SyntheticColumn("e", 254, b"\xf7\1", labels=labels): b"\2",
        SyntheticColumn("s", 254, b"\xf8\1", labels=labels): b"\7",
        SyntheticColumn("text", 252, b"\2", collation=255): b"\x0a\0" + '"\\\n\x01ü😀'.encode(),
        SyntheticColumn("latin", 15, b"\x0a\0", collation=8): b"\3\x80\xff\x81",
        SyntheticColumn("cyrillic", 15, b"\x0a\0", collation=51): b"\2\xef\xf0",
        SyntheticColumn("bytes", 254, b"\xfe\6", collation=63): b"\2ab",
        SyntheticColumn("more", 254, b"\xfe\6", collation=63): b"\2\xffb",
        SyntheticColumn("blob", 252, b"\1", collation=63): b"\4abcd",
        SyntheticColumn("bad", 15, b"\x0a\0", collation=45): b"\2\xc3\x28",
    }
    fields = list(values)
    described = samples.description("shop", "everything", fields, (1,))
    log = SyntheticLog().start().begin(1, 5_000_000).table(7, described)
    head = packed(len(fields)) + bitmap([True] * len(fields))
    row = bitmap([False] * len(fields)) + b"".join(values.values())
    log.rows(30, 7, head + row).rows(31, 7, head + head[1:] + row + row).rows(32, 7, head + row)
    return Made(log.commit().stream(), {7: Table("shop", "everything", fields, (1,))})
