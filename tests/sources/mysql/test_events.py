"""Every kind of event: what the decoder makes of it, and where it stops."""

from __future__ import annotations

import json
import struct
import uuid

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.sources.mysql.decode.decoder import DecodedBinlog
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.binlog import parse_tagged_gtid
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.position import GtidSet
from deltaforge_lab.synthetic.mysql_events import FILE, SID, SyntheticLog, packed
from tests.sources.mysql import recorded
from tests.sources.mysql.decode.test_decoder import (
    DESCRIPTION,
    TABLE,
    decode,
    inserts,
    make_decoder,
    rows_of,
    transaction,
)
from tests.sources.mysql.reference import Catalog, NoLog, Place, Progress

SERVER = str(uuid.UUID(bytes=SID))


def varying(number: int, *, signed: bool = False) -> bytes:
    """Return a number as the server's serialization library writes it."""
    if signed:
        number = ~number << 1 | 1 if number < 0 else number << 1
    for more in range(8):
        if number < 1 << (7 * (more + 1)):
            return (number << (more + 1) | ((1 << more) - 1)).to_bytes(more + 1, "little")
    return b"\xff" + number.to_bytes(8, "little")


def tagged(number: int, tag: str, *, ts_us: int = 0, needed: int = 0) -> bytes:
    """Return the body of a GTID_TAGGED event."""
    fields = b"\0" + varying(1) + varying(1) + b"".join(map(varying, SID))
    fields += varying(2) + varying(number, signed=True)
    fields += varying(3) + varying(len(tag)) + tag.encode()
    fields += varying(4) + varying(-1, signed=True) + varying(6) + varying(ts_us)
    fields += varying(8) + varying(1 << 40)
    size = 3 + len(fields)  # of one byte each: version, size, what must be known
    return varying(1) + varying(size) + varying(needed) + fields


def compressed(content: bytes, *, kind: int = 0, size: int | None = None) -> bytes:
    """Return the body of a TRANSACTION_PAYLOAD event."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    data = sink.getvalue().to_pybytes() if kind == 0 else content
    values = {2: kind, 1: len(data), 3: len(content) if size is None else size}
    head = b"".join(
        packed(field) + packed(len(packed(value))) + packed(value)
        for field, value in values.items()
    )
    return head + b"\0" + data


def nested(build: SyntheticLog) -> bytes:
    """Return the events of a log as they stand in a payload: no packets, no checksums."""
    return b"".join(part[5:] for part in build.parts)


def plain() -> SyntheticLog:
    """Return a log to build nested events with."""
    return SyntheticLog(checksums=False, parts=[b"     "])


def an_event() -> bytes:
    """Return an event without packet and checksum."""
    return nested(plain().query("BEGIN"))


XID = Xid(1, b"order", b"7")


def xa(log: SyntheticLog, number: int, *rows: int, one_phase: bool = False) -> SyntheticLog:
    """Add a transaction of XA that inserts rows into `users`, and is prepared."""
    log.gtid(number, 1_000_000 * number).query(f"XA START {XID}").table(TABLE, DESCRIPTION)
    inserts(log, *rows).query(f"XA END {XID}")
    body = struct.pack("<Biii", one_phase, 1, 5, 1) + b"order7"
    return log.event(38, body)


class TestStatements:
    """DDL and TRUNCATE are rows, in order with the others."""

    def test_ddl_is_a_row(self) -> None:
        """A transaction of its own, of table `_ddl`, with the statement and its database."""
        log = transaction(SyntheticLog().start(), 1, 1).gtid(2, 2_500_000)
        log.query("/* x */ alter table users add w int")
        transaction(log, 3, 2)
        catalog, progress = Catalog(), Progress()
        rows = rows_of(decode(log.stream(), catalog=catalog, progress=progress)[0])

        assert [(row["op"], row["table"], row["row"], row["tx_end"]) for row in rows] == [
            ("c", "users", 0, True),
            ("ddl", "_ddl", 0, True),
            ("c", "users", 0, True),
        ]
        ddl = rows[1]
        assert json.loads(ddl["ddl"]) == {
            "sql": "/* x */ alter table users add w int",
            "database": "shop",
        }
        assert (ddl["db"], ddl["tx_id"], ddl["ts_us"]) == ("shop", f"{SERVER}:2", 2_500_000)
        assert ddl["before"] is ddl["after"] is ddl["key"] is ddl["schema_version"] is None
        assert catalog.statements == [("shop", "  alter table users add w int")]
        assert [(run.first, run.last) for run in progress.runs] == [(1, 1), (2, 2), (3, 3)]
        assert len({row["event_id"] for row in rows}) == 3

    def test_truncate_is_a_row_of_its_table(self) -> None:
        """Only where the table is captured; the position passes it anyway."""
        log = SyntheticLog().start().gtid(1).query("TRUNCATE TABLE `users`").gtid(2)
        log.query("TRUNCATE other.users", "")
        batches, error = decode(log.stream(), captures=lambda db, _: db == "shop")

        assert error is None
        (row,) = rows_of(batches)
        assert (row["op"], row["db"], row["table"], row["tx_end"]) == ("t", "shop", "users", True)
        assert json.loads(row["ddl"]) == {"sql": "TRUNCATE TABLE `users`", "database": "shop"}
        assert batches[-1].end == Place(FILE, log.pos, 2)

    def test_ddl_inside_a_transaction(self) -> None:
        """CREATE TABLE ... SELECT, logged for rows: the statement, then its rows, one transaction."""
        log = (
            SyntheticLog()
            .start()
            .begin(1)
            .query("CREATE TABLE users (id bigint) START TRANSACTION")
        )
        inserts(log.table(TABLE, DESCRIPTION), 1, 2).commit()
        rows = rows_of(decode(log.stream())[0])

        assert [(row["op"], row["row"], row["tx_end"]) for row in rows] == [
            ("ddl", 0, False),
            ("c", 1, False),
            ("c", 2, True),
        ]

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE USER x IDENTIFIED BY 'geheim'",
            "ALTER USER x IDENTIFIED BY 'geheim'",
            "DROP ROLE r",
            "CREATE TEMPORARY TABLE t (id int)",
            "DROP /*!40005 TEMPORARY */ TABLE IF EXISTS `t`",
            "GRANT SELECT ON *.* TO x",
            "SET PASSWORD FOR x = 'geheim'",
            "ANALYZE TABLE users",
            "FLUSH TABLES",
            "# Dummy event",
        ],
    )
    def test_what_concerns_no_table_is_passed(self, statement: str) -> None:
        """Accounts (with their passwords), temporary tables and statistics are no rows."""
        log = SyntheticLog().start().gtid(1).query(statement)
        batches, error = decode(log.stream())

        assert error is None
        assert rows_of(batches) == []
        assert batches[-1].end == Place(FILE, log.pos, 1)

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE t SELECT * FROM s",
            "CREATE TABLE t (id int) AS (SELECT 1)",
            "create table t as with c as (select 1) select * from c",
            "CREATE TABLE t TABLE s",
            "CREATE TABLE t VALUES ROW(1)",
            "CREATE OR REPLACE TABLE t (id int) SELECT 1",
            "DO f()",
            "CALL p()",
            "ANALYZE UPDATE users SET id = 2",
            "SET STATEMENT max_statement_time = 1 FOR INSERT INTO users VALUES (1)",
            "UPDATE other.t, users SET users.id = 2",
            "(SELECT f())",
            "FROBNICATE",
            "XA COMMIT",
        ],
    )
    def test_rows_that_are_not_in_the_log_stop(self, statement: str) -> None:
        """A statement that fills a table, or that is not known and names none, stops with its words."""
        log = transaction(SyntheticLog().start(version="11.4.5-MariaDB-log"), 1, 1)
        batches, error = decode(log.gtid(2).query(statement).stream())

        assert isinstance(error, UnsupportedEvent | CorruptLog)
        assert f"after {FILE}" in str(error)
        assert len(rows_of(batches)) == 1

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE other.t SELECT * FROM users",
            "REPLACE INTO other.sums (x) SELECT x FROM shop.users",
            "INSERT IGNORE other.t VALUES (1)",
            "UPDATE other.t SET x = 1",
            "DELETE FROM other.t",
            "FROBNICATE TABLE other.t",
        ],
    )
    def test_rows_of_tables_that_are_not_captured_stop_nothing(self, statement: str) -> None:
        """Statements in place of rows, and unknown ones: the log goes on behind them."""
        log = transaction(SyntheticLog().start(), 1, 1).gtid(2).query(statement, "another")
        batches, error = decode(
            transaction(log, 3, 2).stream(), captures=lambda db, _: db == "shop"
        )

        assert error is None
        defines = ["ddl"] if statement.startswith("CREATE") else []
        assert [row["op"] for row in rows_of(batches)] == ["c", *defines, "c"]
        assert not any(batch.parked for batch in batches)

    @pytest.mark.parametrize(
        "statement",
        [
            "FROBNICATE users",
            "FROBNICATE other.t, `shop`.`users`",
            "FROBNICATE DATABASE shop",
            "SET STATEMENT sql_mode = 'ANSI_QUOTES' FOR ALTER TABLE \"users\" ADD x int",
        ],
    )
    def test_an_unknown_statement_holds_the_tables_that_it_names(self, statement: str) -> None:
        """Their changes from there on wait for somebody who knows what it does; all others come."""
        log = transaction(SyntheticLog().start(version="11.4.5-MariaDB-log"), 1, 1).gtid(2)
        log.query(statement)
        batches, error = decode(
            transaction(log, 3, 2).stream(), captures=lambda db, _: db == "shop"
        )

        assert error is None
        assert [row["op"] for row in rows_of(batches)] == ["c"]
        held = [event for batch in batches for event in batch.parked]
        assert [event.table for event in held] == ["shop.users", "shop.users"]
        assert "which this version does not know" in held[0].reason
        assert batches[-1].end == Place(FILE, log.pos, 3)

    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE other.d LIKE other.table",
            "CREATE TABLE d LIKE other.select",
            "CREATE TABLE other.values (id int)",
            "CREATE TABLE other.select (`table` int, x int REFERENCES other.table (id))",
            "CREATE TABLE `t` (id int) UNION = (other.table, other.values)",
            "CREATE TABLE t (`select` int, c varchar(9) DEFAULT 'select')",
            "CREATE TABLE t LIKE s -- select\n",
            "CREATE VIEW v AS SELECT 1",
            "CREATE TABLE t (id int, x int AS (id + 1)) COMMENT 'table' PARTITION BY HASH (id)",
        ],
    )
    def test_a_query_is_not_seen_where_there_is_none(self, statement: str) -> None:
        """Names, literals and comments are not words of the statement."""
        batches, error = decode(SyntheticLog().start().gtid(1).query(statement).stream())

        assert error is None
        assert [row["op"] for row in rows_of(batches)] == ["ddl"]

    def test_text_is_in_the_client_s_character_set(self) -> None:
        """The event says which: `é` in latin1 is one byte."""
        variables = (
            b"\0" + bytes(4) + b"\1" + bytes(8) + b"\6\3std" + b"\4" + bytes([8, 0, 8, 0, 8, 0])
        )
        head = struct.pack("<IIBHH", 8, 0, 4, 0, len(variables)) + variables + b"shop\0"
        log = (
            SyntheticLog()
            .start()
            .gtid(1)
            .event(2, head + "CREATE TABLE é (id int)".encode("latin1"))
        )
        (row,) = rows_of(decode(log.stream())[0])

        assert json.loads(row["ddl"])["sql"] == "CREATE TABLE é (id int)"


def count(decoded: DecodedBinlog) -> int:
    """Return how many rows came."""
    return sum(batch.rows.num_rows for batch in decoded.batches if batch.rows)


class TestCompressed:
    """TRANSACTION_PAYLOAD events."""

    def payload(self, *rows: int) -> bytes:
        """Return the events of a transaction that inserts rows into `users`."""
        build = plain().query("BEGIN").table(TABLE, DESCRIPTION)
        return nested(inserts(build, *rows).commit())

    @pytest.mark.parametrize("kind", [0, 255])
    def test_its_rows_are_those_of_the_transaction(self, kind: int) -> None:
        """Same ids as without compression; they stand where the payload stands."""
        log = SyntheticLog().start().gtid(1, 1_000_000)
        log.event(40, compressed(self.payload(1, 2, 3), kind=kind))
        end = log.pos
        transaction(log, 2, 4)
        batches, error = decode(log.stream())
        rows = rows_of(batches)
        other = rows_of(decode(transaction(SyntheticLog().start(), 1, 1, 2, 3).stream())[0])

        assert error is None
        assert [json.loads(row["after"])["id"] for row in rows] == [1, 2, 3, 4]
        assert [row["event_id"] for row in rows[:3]] == [row["event_id"] for row in other]
        assert [row["tx_end"] for row in rows] == [False, False, True, True]
        assert {row["pos"] for row in rows[:3]} == {end}
        assert Place(FILE, end, 1) in [batch.end for batch in batches]

    def test_a_large_one_comes_in_pieces(self) -> None:
        """However large a transaction is, what one call decodes is bounded."""
        build = plain().query("BEGIN").table(TABLE, DESCRIPTION)
        inserts(build, *range(1000))
        build.parts += 1000 * build.parts[-1:]
        stream = (
            SyntheticLog().start().gtid(1).event(40, compressed(nested(build.commit()))).stream()
        )
        decoder = make_decoder()
        decoded = decoder.feed(stream, len(stream))
        counts = [count(decoded)]
        while decoded.again:
            stream = stream[decoded.consumed :]
            decoded = decoder.feed(stream, len(stream))
            counts.append(count(decoded))

        assert sum(counts) == 1_001_000
        assert max(counts) < 500_000

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "does not follow its format"),
            (b"\1", "does not follow its format"),
            (b"\2\1\7\0x", "compressed in an unknown way, 7"),
            (b"\2\1\0\0not zstd", "cannot be decompressed"),
            (b"\1\1\5\0x", "differs from its size"),
            (compressed(b"x" * 30, size=31), "where a transaction may not have it"),
            (compressed(b"x" * 10), "end too early"),
            (compressed(an_event()[:-1]), "end too early"),
            (compressed(bytes(30)), "shorter"),
        ],
    )
    def test_damage_is_named(self, body: bytes, words: str) -> None:
        """A payload that is not as it says stops with its place."""
        batches, error = decode(
            transaction(SyntheticLog().start(), 1, 1).gtid(2).event(40, body).stream()
        )

        assert isinstance(error, DeltaforgeError)
        assert f" {FILE}:" in str(error)
        assert words in str(error) or isinstance(error, CorruptLog)
        assert len(rows_of(batches)) == 1

    def test_what_may_not_be_inside_is_refused(self) -> None:
        """A payload in a payload, another file, another transaction."""
        for build in (
            plain().event(40, compressed(b"")),
            plain().query("BEGIN").commit().event(4, bytes(8) + b"binlog.000009"),
            plain().query("BEGIN").commit().gtid(9),
        ):
            log = SyntheticLog().start().gtid(1).event(40, compressed(nested(build)))
            assert isinstance(decode(log.stream())[1], CorruptLog)


class TestXa:
    """Rows of a prepared transaction count when it is committed."""

    def test_rows_come_with_the_commit(self) -> None:
        """As changes of the committing transaction, behind what was committed between."""
        log = transaction(xa(SyntheticLog().start(), 1, 1, 2), 2, 3)
        before, _ = decode(log.stream())
        log.gtid(3, 3_000_000).query(f"XA COMMIT {XID}")
        batches, error = decode(log.stream())
        rows = rows_of(batches)

        assert error is None
        assert [json.loads(row["after"])["id"] for row in rows_of(before)] == [3]
        assert [json.loads(row["after"])["id"] for row in rows] == [3, 1, 2]
        assert [(row["tx_id"], row["row"], row["tx_end"]) for row in rows[1:]] == [
            (f"{SERVER}:3", 0, False),
            (f"{SERVER}:3", 1, True),
        ]
        assert {row["pos"] for row in rows[1:]} == {log.pos}
        assert batches[-1].end == Place(FILE, log.pos, 3)

    def test_a_rolled_back_one_is_never_seen(self) -> None:
        """Its name may be used again afterwards."""
        log = xa(SyntheticLog().start(), 1, 1).gtid(2).query(f"XA ROLLBACK {XID}")
        xa(log, 3, 2).gtid(4).query(f"XA COMMIT {XID}")
        batches, error = decode(log.stream())

        assert error is None
        assert [json.loads(row["after"])["id"] for row in rows_of(batches)] == [2]
        assert batches[-1].end == Place(FILE, log.pos, 4)

    def test_one_phase(self) -> None:
        """XA COMMIT ... ONE PHASE: prepared and committed by one event."""
        log = transaction(xa(SyntheticLog().start(), 1, 1, 2, one_phase=True), 2, 3)
        rows = rows_of(decode(log.stream())[0])

        assert [(row["tx_id"], row["tx_end"]) for row in rows] == [
            (f"{SERVER}:1", False),
            (f"{SERVER}:1", True),
            (f"{SERVER}:2", True),
        ]

    def test_one_phase_in_a_compressed_transaction(self) -> None:
        """A payload may hold all of it."""
        build = plain().query(f"XA START {XID}").table(TABLE, DESCRIPTION)
        inserts(build, 1, 2).query(f"XA END {XID}")
        build.event(38, struct.pack("<Biii", 1, 1, 5, 1) + b"order7")
        log = transaction(SyntheticLog().start().gtid(1).event(40, compressed(nested(build))), 2, 3)

        assert len(rows_of(decode(log.stream())[0])) == 3

    def test_what_is_not_kept_is_found_in_the_log(self) -> None:
        """A reader that began in between asks for the events again; ids are the same."""
        whole = xa(SyntheticLog().start(), 1, 1, 2).gtid(2).query(f"XA COMMIT {XID}")
        build = plain().table(TABLE, DESCRIPTION)
        found = nested(inserts(build, 1, 2))
        later = SyntheticLog().start().gtid(2).query(f"XA COMMIT {XID}")
        pieces = NoLog({XID: [found[:70], found[70:]]})
        rows = rows_of(decode(later.stream(), prepared=pieces)[0])
        expected = rows_of(decode(whole.stream())[0])
        _, missing = decode(later.stream())

        assert [row["after"] for row in rows] == [row["after"] for row in expected]
        assert [row["event_id"] for row in rows] == [row["event_id"] for row in expected]
        assert "no transaction X'6f72646572',X'37',1" in str(missing)

    def test_large_ones_are_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory is bounded: what does not fit is asked for when it is committed."""
        monkeypatch.setattr("deltaforge_dagster.sources.mysql.stream.prepared.MAX_KEPT_BYTES", 50)
        log = xa(SyntheticLog().start(), 1, 1, 2).gtid(2).query(f"XA COMMIT {XID}")
        _, error = decode(log.stream())

        assert "no transaction" in str(error)


class TestTaggedGtids:
    """GTID_TAGGED events of MySQL 8.3 and later."""

    def test_the_tag_belongs_to_the_name(self) -> None:
        """In `tx_id`, in the position, and in the event ids."""
        log = SyntheticLog().start().event(42, tagged(7, "batch", ts_us=9_000_000)).query("BEGIN")
        inserts(log.table(TABLE, DESCRIPTION), 1).commit()
        transaction(log, 7, 2)
        progress = Progress()
        rows = rows_of(decode(log.stream(), progress=progress)[0])

        assert [row["tx_id"] for row in rows] == [f"{SERVER}:batch:7", f"{SERVER}:7"]
        assert rows[0]["ts_us"] == 9_000_000
        assert [(run.tag, run.first, run.last) for run in progress.runs] == [
            ("batch", 7, 7),
            ("", 7, 7),
        ]
        assert rows[0]["event_id"][24:] != rows[1]["event_id"][24:]

    def test_numbers_of_any_size(self) -> None:
        """As in the examples of the library's documentation."""
        for number in (0, 1, 127, 128, 65535, 1 << 40, (1 << 56) - 1, (1 << 63) - 3):
            if number:
                assert parse_tagged_gtid(tagged(number, "t")).number == number
        assert varying(65535) == bytes([0b11111011, 0b11111111, 0b00000111])
        assert varying(123, signed=True) == b"\xd9\x03"

    def test_unknown_fields(self) -> None:
        """One that must be known stops; one that need not be is passed."""
        with pytest.raises(UnsupportedEvent, match="a field 12 that must be known"):
            parse_tagged_gtid(tagged(1, "t", needed=13))
        body = tagged(1, "t") + varying(12) + b"later"
        parsed = parse_tagged_gtid(body[:1] + varying(len(body)) + body[2:])

        assert (parsed.number, parsed.tag) == (1, "t")

    def test_damage(self) -> None:
        """Cut anywhere, it is no GTID; nothing else is raised."""
        body = tagged(1, "batch")
        for cut in range(len(body)):
            with pytest.raises(CorruptLog):
                parse_tagged_gtid(body[:cut])


BOUNDARY, ROWS, PASSED, STOPS = "boundary", "rows", "passed", "stops"
EVENTS = {
    **dict.fromkeys(range(46), STOPS),
    **dict.fromkeys(range(165, 172), ROWS),
    160: PASSED, 161: PASSED, 162: BOUNDARY, 163: PASSED, 164: PASSED,
    2: BOUNDARY, 4: BOUNDARY, 15: BOUNDARY, 16: BOUNDARY, 33: BOUNDARY, 34: BOUNDARY, 38: BOUNDARY,
    42: BOUNDARY,
    19: ROWS, 23: ROWS, 24: ROWS, 25: ROWS, 30: ROWS, 31: ROWS, 32: ROWS, 39: ROWS,
    40: ROWS,
    172: STOPS,
    3: PASSED, 5: PASSED, 13: PASSED, 14: PASSED, 27: PASSED, 28: PASSED, 29: PASSED, 35: PASSED, 36: PASSED, 37: PASSED, 41: PASSED,
}  # fmt: skip
"""Every type of event that MySQL or MariaDB has, and what becomes of it."""


@pytest.mark.parametrize(("kind", "fate"), EVENTS.items())
def test_every_type_of_event_has_its_fate(kind: int, fate: str) -> None:
    """Passed over, read, or a stop with name and place: an event is never skipped unknown."""
    log = transaction(SyntheticLog().start(), 1, 1).gtid(2)
    place = f"after {FILE}:{log.pos}"
    batches, error = decode(log.event(kind, b"").stream())

    assert len(rows_of(batches)) == 1
    if fate == PASSED:
        assert error is None
    elif fate == STOPS:
        assert isinstance(error, UnsupportedEvent)
        assert "the log holds an event" in str(error)
        assert place in str(error)
    else:  # read: an empty one is damaged, or stands in the wrong place
        assert isinstance(error, CorruptLog)
        assert place in str(error)


@pytest.mark.parametrize("kind", [43, 100, 175, 255])
def test_unknown_events_may_be_ignorable(kind: int) -> None:
    """The flag of the event decides, as the server that wrote it says."""
    log = transaction(SyntheticLog().start(), 1, 1)
    batches, error = decode(log.event(kind, b"?", flags=0x80).stream())
    _, stopped = decode(log.event(kind, b"?").stream())

    assert error is None
    assert len(rows_of(batches)) == 1
    assert f"type {kind}" in str(stopped)


def test_a_fragment_of_changes_stops() -> None:
    """MariaDB 12.3 divides large rows events; a fragment has changes, whatever its flags say."""
    log = transaction(SyntheticLog().start(), 1, 1)
    batches, error = decode(log.event(172, b"\2\0\0\0\1\0\0\0\0part", flags=0x80).stream())

    assert len(rows_of(batches)) == 1
    assert isinstance(error, UnsupportedEvent)
    assert "binlog_row_event_fragment_threshold" in str(error)


def test_an_incident_stops() -> None:
    """The server says that events are missing from its log."""
    _, error = decode(SyntheticLog().start().gtid(1).event(26, b"\1\0\4lost").stream())

    assert isinstance(error, UnsupportedEvent)
    assert "INCIDENT" in str(error)


def test_statement_format_stops_only_for_a_captured_table() -> None:
    """INTVAR, RAND and USER_VAR prepare a statement that no row stands for; LOAD DATA has events of its own."""
    for kind in (5, 13, 14):
        log = SyntheticLog().start().begin(1).event(kind, bytes(9))
        log.query("INSERT INTO users SELECT * FROM other.t").commit()
        _, error = decode(log.stream(), captures=lambda db, _: db == "shop")
        batches, elsewhere = decode(log.stream(), captures=lambda db, _: db == "other")

        assert isinstance(error, UnsupportedEvent)
        assert "INSERT INTO" in str(error)
        assert elsewhere is None
        assert batches[-1].end == Place(FILE, log.pos, 1)
    _, error = decode(SyntheticLog().start().begin(1).event(17, bytes(9)).stream())
    assert "BEGIN_LOAD_QUERY" in str(error)


def test_a_file_that_was_not_closed_is_read_on() -> None:
    """A server that crashed begins another file; the old one says that it is in use."""
    log = transaction(SyntheticLog().start(), 1, 1)
    log.event(binlog.ROTATE, (4).to_bytes(8, "little") + b"binlog.000002", flags=0x20, end=0)
    log.start("binlog.000002").event(35, bytes(8))
    batches, error = decode(transaction(log, 2, 2).stream())

    assert error is None
    assert [row["file"] for row in rows_of(batches)] == [FILE, "binlog.000002"]


def test_a_log_of_mysql_9() -> None:
    """Real bytes: compression, tags, XA in a compressed transaction, CREATE TABLE ... SELECT."""
    progress = Progress()
    batches, error = decode(recorded.stream(), progress=progress)
    rows = [
        (row["op"], row["table"], row["after"] and json.loads(row["after"]), row["tx_end"])
        for row in rows_of(batches)
    ]

    assert error is None
    assert rows == [
        ("c", "orders", {"id": 1, "v": "a"}, False),
        ("c", "orders", {"id": 2, "v": "b"}, False),
        ("u", "orders", {"id": 2, "v": "x"}, True),
        ("c", "orders", {"id": 3, "v": "c"}, True),
        ("c", "orders", {"id": 4, "v": "d"}, True),
        ("c", "orders", {"id": 5, "v": "e"}, True),
        ("ddl", "_ddl", None, False),
        ("c", "copy", {"id": 1}, False),
        ("c", "copy", {"id": 2}, True),
        ("t", "orders", None, True),
    ]
    executed = GtidSet()
    for run in progress.runs:
        executed.add(str(uuid.UUID(bytes=run.sid)), run.first, run.last, run.tag)
    before, after = (GtidSet.from_bytes(previous_gtids(content)) for content in recorded.files())
    assert before <= after
    for text in str(executed).split(","):
        assert GtidSet.parse(text) <= after
    server = str(executed).partition(":")[0]
    assert after.contains(server, 2, "batch")
    assert executed.contains(server, 2, "batch")
    assert not before.contains(server, 2, "batch")


def previous_gtids(content: bytes) -> bytes:
    """Return the body of the second event of a file."""
    at = 4 + int.from_bytes(content[13:17], "little")
    (size,) = struct.unpack_from("<I", content, at + 9)
    assert content[at + 4] == 35
    return content[at + 19 : at + size - 4]
