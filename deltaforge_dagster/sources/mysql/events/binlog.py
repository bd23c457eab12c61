"""The wire format of MySQL's binary log, and parsers for its infrequent events.

MySQL internals documentation, "Replication Protocol": "Binlog Network Stream" and "Binlog Event".
Numbers are little-endian unless said; a packed number is the protocol's length-encoded integer.
After `COM_BINLOG_DUMP` the server sends packets, one event each::

    packet      Int24 size | Int8 sequence | Byte1 | content
                  Byte1 0x00: an event follows; 0xFF: an error; 0xFE: end of the stream.
                  Size 0xFFFFFF: the next packet goes on with the same event (without Byte1), and
                  so on until a packet of another size, which may be 0.

    event       Int32 time, seconds since 1970 | Int8 type | Int32 server id | Int32 size
                | Int32 end position in the file, modulo 2^32; 0 if it is in no file
                | Int16 flags | body | CRC32 of everything before it, where the file has checksums

    type and body
      2 QUERY             Int32 thread | Int32 seconds | Int8 size of database | Int16 error
                          | Int16 size of status variables | variables | database | 0 | statement
                            variables: Int8 code | value, whose size follows from the code ...
      4 ROTATE            Int64 position | file name
     15 FORMAT_DESCR.     Int16 version 4 | Byte50 server version | Int32 time | Int8 19
                          | sizes of the events' fixed parts ... | Int8 checksum: 0 none, 1 CRC32
     16 XID               Int64 xid                                          the commit of InnoDB
     19 TABLE_MAP         see `table_map`
     23-25, 30-32 ROWS    see `scan_rows`
     33 GTID, 34 ANON.    Int8 flags | Byte16 UUID | Int64 number | Int8 2 | Int64, Int64 clocks
                          | Int56 commit time on this server, microseconds since 1970 (MySQL 8.0);
                          its highest bit: Int56 commit time on the first server follows | ...
     38 XA_PREPARE        Int8 1 for one phase | Int32 format | Int32 size of gtrid | Int32 of bqual
                          | gtrid | bqual                                       see `prepared`
     40 TRANSACTION_PAYLOAD                       see `compressed_events`
     42 GTID_TAGGED                               see below
    160 ANNOTATE_ROWS, 161 BINLOG_CHECKPOINT, 163 GTID_LIST: MariaDB's; no change, skipped
    162 MariaDB's GTID    Int64 number | Int32 domain | Int8 flags | 2: Int64 group of commits
                          | 64, 128: Int32 format, Int8 size of gtrid, Int8 of bqual, gtrid, bqual
                          | Int8 more flags | ... ; the server is that of the event's header
      flags               1 standalone: a statement follows, such as DDL or XA COMMIT; otherwise
                          a transaction follows, without QUERY `BEGIN`
                          64 an XA transaction, without QUERY `XA START`; 128 one that ends it
      more flags          2 ALTER TABLE begins, 4 and 8 it ends or fails (binlog_alter_two_phase)
    164 START_ENCRYPTION  MariaDB's file is encrypted, but the dump stream is not: skipped
    165-171               MariaDB's compressed events                see `compressed_events`
     5 INTVAR, 13 RAND, 14 USER_VAR: values for the next statement: skipped
     27, 41 HEARTBEAT, 3 STOP, 28 IGNORABLE, 29 ROWS_QUERY, 35 PREVIOUS_GTIDS,
     36 TRANSACTION_CONTEXT, 37 VIEW_CHANGE: no change, skipped, like any event whose flags
     have 0x80 ("ignorable")

A transaction consists of GTID (or ANONYMOUS_GTID, or GTID_TAGGED), QUERY `BEGIN`, any number of
TABLE_MAP and ROWS events, and XID or QUERY `COMMIT`; everything after the GTID may be inside a
TRANSACTION_PAYLOAD. A DDL statement is GTID and QUERY alone. An XA transaction is GTID, QUERY `XA
START`, TABLE_MAP and ROWS events, QUERY `XA END`, XA_PREPARE, and later, as a separate transaction,
GTID and QUERY `XA COMMIT` or `XA ROLLBACK`. MariaDB's manual ("Replication Protocol") describes its
events; inside a transaction, they have no end position.

The kernels (`decode.scan`, `decode.rows`) read the frequent events. This module has the types of
all events, the parsers of QUERY, ROTATE, FORMAT_DESCRIPTION and GTID, and the names of events for
errors.

GTID_TAGGED (MySQL 8.3 and later) has no fixed offsets: it is a message of the server's
serialization library (manual of the server's source: "PageLibsMysqlSerialization"; fields as in
`Gtid_event::define_fields`)::

    version 1 | size of the message, from here back to its start | last field that must be known, +
    1
    | for each field that is there: number of the field | value

      0 flags   1 UUID, a number per byte   2 number of the GTID (signed)   3 tag: size, text
      4, 5 clocks (signed)   6 commit time on this server   7 on the first server, if it is another
      8 size of the transaction   9 version of this server   10 of the first server
      11 commit group

All its numbers have a variable size: the number of low-order one bits of the first byte says how
many bytes follow. The value, little-endian, begins above the zero bit after them. A signed number
has its sign in the lowest bit; if it is negative, the other bits are inverted.
"""

from __future__ import annotations

import hashlib
import re
import struct
import uuid
import zlib
from dataclasses import dataclass

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.sql_text import SqlSession, decoded, plain

HEADER = 19
"""Bytes of an event before its body."""
CHECKSUM_SIZE = 4

QUERY, STOP, ROTATE, FORMAT_DESCRIPTION, XID, TABLE_MAP = 2, 3, 4, 15, 16, 19
WRITE_ROWS_1, UPDATE_ROWS_1, DELETE_ROWS_1 = 23, 24, 25
WRITE_ROWS_2, UPDATE_ROWS_2, DELETE_ROWS_2 = 30, 31, 32
PARTIAL_UPDATE_ROWS = 39
INTVAR, RAND, USER_VAR = 5, 13, 14
HEARTBEAT, IGNORABLE, ROWS_QUERY, HEARTBEAT_2 = 27, 28, 29, 41
GTID, ANONYMOUS_GTID, PREVIOUS_GTIDS, TRANSACTION_CONTEXT, VIEW_CHANGE = 33, 34, 35, 36, 37
XA_PREPARE, PARTIAL_UPDATE_ROWS, TRANSACTION_PAYLOAD, GTID_TAGGED = 38, 39, 40, 42
ANNOTATE_ROWS, BINLOG_CHECKPOINT, MARIADB_GTID, GTID_LIST, START_ENCRYPTION = range(160, 165)
QUERY_COMPRESSED = 165
WRITE_ROWS_COMPRESSED_1, UPDATE_ROWS_COMPRESSED_1, DELETE_ROWS_COMPRESSED_1 = 166, 167, 168
WRITE_ROWS_COMPRESSED_2, UPDATE_ROWS_COMPRESSED_2, DELETE_ROWS_COMPRESSED_2 = 169, 170, 171
PARTIAL_ROW_DATA = 172

_TWO_BYTES = 252
"""First byte of a packed number that has two more."""

FLAG_ARTIFICIAL, FLAG_IGNORABLE = 0x20, 0x80
"""Event flags: made by the server for this connection, in no file; may be skipped if unknown."""

EVENT_NAMES = {
    0: "UNKNOWN",
    1: "START_V3",
    9: "APPEND_BLOCK",
    11: "DELETE_FILE",
    17: "BEGIN_LOAD_QUERY",
    18: "EXECUTE_LOAD_QUERY",
    20: "WRITE_ROWS (version 0)",
    21: "UPDATE_ROWS (version 0)",
    22: "DELETE_ROWS (version 0)",
    26: "INCIDENT (the server lost events)",
    MARIADB_GTID: "GTID of an ALTER TABLE in two phases (binlog_alter_two_phase=ON)",
    PARTIAL_ROW_DATA: (
        "PARTIAL_ROW_DATA (a part of changes of more bytes than"
        " binlog_row_event_fragment_threshold)"
    ),
}
"""Names of events that are not decoded, mostly as in `SHOW BINLOG EVENTS`."""


class FieldReader:
    """Reads the fields of an event in order; raises `CorruptLog` if the content is too short.

    Args:
        content: The fields.
        name: What they belong to, for error messages: `a TABLE_MAP event`.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self._content = content
        self._name = name
        self.at = 0

    def __bool__(self) -> bool:
        """Return whether anything is left to read."""
        return self.at < len(self._content)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > len(self._content) - self.at:
            raise CorruptLog(f"{self._name} that is too short")
        self.at += size
        return self._content[self.at - size : self.at]

    def number(self, size: int) -> int:
        """Return the next little-endian number of `size` bytes."""
        return int.from_bytes(self.read(size), "little")

    def packed(self) -> int:
        """Return the next packed number (length-encoded integer)."""
        first = self.number(1)
        if first < 251:
            return first
        if first not in (252, 253, 254):
            raise CorruptLog(f"{self._name} with a number that is none")
        return self.number({252: 2, 253: 3, 254: 8}[first])


@dataclass(frozen=True, slots=True)
class LogServer:
    """The server that wrote a log file, as the file's FORMAT_DESCRIPTION event names it.

    Attributes:
        version: `8.0.15` as numbers; zeros if it is unknown.
        is_mariadb: Whether it is MariaDB.
    """

    version: tuple[int, ...] = (0, 0, 0)
    is_mariadb: bool = False

    @classmethod
    def named(cls, text: str) -> LogServer:
        """Return the server of a version text: `8.0.15-log`, `5.5.5-10.5.23-MariaDB-log`."""
        is_mariadb = "mariadb" in text.lower()
        # MariaDB 10 puts 5.5.5 first: old replicas read the version's first digit (MDEV-4088).
        if is_mariadb:
            text = text.removeprefix("5.5.5-")
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        return cls(tuple(map(int, numbers.groups())) if numbers else cls().version, is_mariadb)

    @property
    def text(self) -> str:
        """The text from which `named` makes an equal server."""
        return ".".join(map(str, self.version)) + ("-MariaDB" if self.is_mariadb else "")


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """A statement in the log.

    Attributes:
        database: Its default database, "" for none.
        statement: Its text as it was logged, to show to users.
        sql: Its text as the server has read it (`sql_text.plain`), to be parsed.
    """

    database: str
    statement: str
    sql: str


def left_out(event: bytes) -> tuple[int, list[int]]:
    """Return the table id of a WRITE_ROWS event, and the columns that its rows lack.

    The columns are numbers from 0 on. `scan_rows` has checked that the event is long enough.
    """
    at = HEADER + 8
    if event[4] >= WRITE_ROWS_2:
        at += int.from_bytes(event[at : at + 2], "little")
    count = event[at]
    at += 1
    if count == _TWO_BYTES:
        count = int.from_bytes(event[at : at + 2], "little")
        at += 2
    lacking = [i for i in range(count) if not event[at + (i >> 3)] >> (i & 7) & 1]
    return int.from_bytes(event[HEADER : HEADER + 6], "little"), lacking


def parse_query(body: bytes, server: LogServer) -> QueryEvent:
    """Parse the body of a QUERY event that a server wrote.

    Raises:
        CorruptLog: It is too short.
    """
    try:
        _, _, database_size, _, status_size = struct.unpack_from("<IIBHH", body)
    except struct.error as error:
        raise CorruptLog("a QUERY event that is too short") from error
    at = 13 + status_size
    database = body[at : at + database_size]
    if len(body) < at + database_size + 1:
        raise CorruptLog("a QUERY event that is too short")
    variables = _status_variables(body[13:at])
    session = SqlSession(
        is_mariadb=server.is_mariadb,
        collation=int.from_bytes(variables.get(_CHARSET, b"")[:2], "little"),
        sql_mode=int.from_bytes(variables.get(_SQL_MODE, b""), "little"),
    )
    statement = decoded(body[at + database_size + 1 :], session)
    sql = plain(statement, session)
    if server.is_mariadb or _DDL_XID in variables:
        sql = _CREATES_UNLESS.sub(r"\1", sql)
    return QueryEvent(database.decode(errors="replace"), statement, sql)


_CREATES_UNLESS = re.compile(r"^(\s*CREATE\s+TABLE\s+)IF\s+NOT\s+EXISTS\b", re.IGNORECASE)
"""CREATE TABLE IF NOT EXISTS. MariaDB logs it only if it has created the table. MySQL logs it in
any case, but since 8.0 with the number of a DDL transaction (`_DDL_XID`) only if it has created the
table."""

_SQL_MODE, _CHARSET, _DDL_XID = 1, 4, 17
_SIZES = {
    0: 4, _SQL_MODE: 8, 3: 4, _CHARSET: 6, 7: 2, 8: 2, 9: 8, 10: 4, 13: 3, 16: 1, _DDL_XID: 8,
}  # fmt: skip
"""Status variables of fixed size that may precede `_DDL_XID`, and their sizes in bytes."""
_TEXTS = {6: 0, 2: 1, 5: 0}
"""Status variables that are texts with a size before them, and how many bytes follow the text."""
_INVOKER, _DATABASES, _TOO_MANY = 11, 12, 254
_COLLATIONS = 131
"""MariaDB's `character_set_collations`, since 11.3: before the client's character set."""


def _status_variables(content: bytes) -> dict[int, bytes]:
    """Return the values of the status variables by code, up to the first code that is not known.

    They are in the order in which the server writes them, flags and modes first (`Query_event` in
    the server's `statement_events.h`). The size of an unknown one is not known, so none after it
    can be read.
    """
    variables: dict[int, bytes] = {}
    at = 0
    while at + 1 < len(content):
        code, begin = content[at], at + 1
        if code in _SIZES:
            at = begin + _SIZES[code]
        elif code in _TEXTS:
            at = begin + 1 + content[begin] + _TEXTS[code]
        elif code == _COLLATIONS:  # pairs of numbers of 2 bytes each
            at = begin + 1 + 4 * content[begin]
        elif code == _INVOKER:  # user and host, each with its size
            host = begin + 1 + content[begin]
            at = host + 1 + int.from_bytes(content[host : host + 1])
        elif code == _DATABASES:  # names that each end with 0
            at = begin + 1
            for _ in range(content[begin] if content[begin] != _TOO_MANY else 0):
                at = content.find(b"\0", at) + 1 or len(content)
        else:
            break
        variables[code] = content[begin:at]
    return variables


def parse_rotate(body: bytes) -> tuple[str, int]:
    """Parse the body of a ROTATE event: the next file, and the position in it.

    Raises:
        CorruptLog: The body is too short.
    """
    if len(body) <= 8:
        raise CorruptLog("a ROTATE event that is too short")
    return body[8:].decode(errors="replace"), int.from_bytes(body[:8], "little")


def has_checksums(event: bytes) -> bool:
    """Return whether the events after a FORMAT_DESCRIPTION event (header included) have a CRC32.

    The FORMAT_DESCRIPTION event itself always ends with a checksum field.

    Raises:
        CorruptLog: The event is not of version 4, or its checksum is unknown or wrong.
    """
    if len(event) < HEADER + 57 + CHECKSUM_SIZE + 1 or event[HEADER : HEADER + 2] != b"\4\0":
        raise CorruptLog("a FORMAT_DESCRIPTION event that is not of version 4")
    algorithm = event[-CHECKSUM_SIZE - 1]
    if algorithm not in (0, 1):
        raise CorruptLog(f"a binary log with checksums of unknown kind {algorithm}")
    checksum = int.from_bytes(event[-CHECKSUM_SIZE:], "little")
    if algorithm == 1 and zlib.crc32(event[:-CHECKSUM_SIZE]) != checksum:
        raise CorruptLog("a FORMAT_DESCRIPTION event that differs from its checksum")
    return algorithm == 1


UNKNOWN_SERVER = LogServer()


def log_server(event: bytes) -> LogServer:
    """Return the server that a FORMAT_DESCRIPTION event (header included) names."""
    text = event[HEADER + 2 : HEADER + 52].rstrip(b"\0")
    return LogServer.named(text.decode("ascii", errors="replace"))


def first_words(sql: str, count: int = 2) -> str:
    """Return the first `count` words of a statement (`QueryEvent.sql`): capitals, single spaces."""
    words = []
    at = 0
    for _ in range(count):
        word = re.compile(r"\s*(\w+)").match(sql, at)
        if word is None:
            break
        words.append(word[1].upper())
        at = word.end()
    return " ".join(words)


_VERSION = 1
_UUID, _NUMBER, _TAG, _COMMITTED, _FIRST_COMMITTED = 1, 2, 3, 6, 7
_SIGNED = (_NUMBER, 4, 5)
_FIELDS = 12
_UUID_SIZE = 16
_MAX_TAG = 32


@dataclass(frozen=True, slots=True)
class GtidEvent:
    """The GTID of a transaction.

    Attributes:
        sid: The server's UUID, 16 bytes.
        number: The number of the GTID.
        tag: The tag, "" for none.
        ts_us: When the transaction was first committed, in microseconds since 1970; 0 if unknown.
    """

    sid: bytes
    number: int
    tag: str
    ts_us: int

    @property
    def server(self) -> str:
        """The server's UUID as text."""
        return str(uuid.UUID(bytes=self.sid))


def parse_gtid(kind: int, body: bytes) -> GtidEvent | None:
    """Parse the body of a GTID or GTID_TAGGED event; return None for any other type of event.

    The commit time is only read from GTID_TAGGED events.

    Args:
        kind: Type of the event.
        body: The event without its header.

    Raises:
        CorruptLog: The body does not follow the format.
        UnsupportedEvent: A GTID_TAGGED event has an unknown field that a reader must know.
    """
    if kind == GTID_TAGGED:
        return parse_tagged_gtid(body)
    if kind != GTID:
        return None
    if len(body) < 25:
        raise CorruptLog("a GTID event that is too short")
    return GtidEvent(body[1:17], int.from_bytes(body[17:25], "little"), "", 0)


def tag_hash(tag: str) -> int:
    """Return a tag's number in the kernels' arrays: a 63-bit hash, never 0; 0 for no tag."""
    if not tag:
        return 0
    digest = hashlib.blake2b(tag.encode(), digest_size=8, person=b"gtid_tag").digest()
    return int.from_bytes(digest, "little") >> 1 or 1


class _MessageReader(FieldReader):
    """Reads the numbers of variable size in a GTID_TAGGED event."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, "a GTID_TAGGED event")

    def unsigned(self) -> int:
        first = self.number(1)
        more = 0
        while first >> more & 1:
            more += 1
        rest = self.number(more)
        if more == 8:  # the first byte is all ones, and the value follows it
            return rest
        return (rest << 8 | first) >> (more + 1)

    def signed(self) -> int:
        number = self.unsigned()
        return ~(number >> 1) if number & 1 else number >> 1

    def octets(self, size: int) -> bytes:
        numbers = [self.unsigned() for _ in range(size)]
        if max(numbers) > 0xFF:
            raise CorruptLog("a GTID_TAGGED event with a number where a byte should be")
        return bytes(numbers)


def parse_tagged_gtid(body: bytes) -> GtidEvent:
    """Parse the body of a GTID_TAGGED event.

    Raises:
        CorruptLog: The body does not follow the format.
        UnsupportedEvent: It has an unknown field that a reader must know.
    """
    message = _MessageReader(body)
    version, size, needed = message.unsigned(), message.unsigned(), message.unsigned()
    if version != _VERSION or needed > _FIELDS:
        raise UnsupportedEvent(
            f"a GTID_TAGGED event of version {version}, with a field {needed - 1} that must be"
            " known"
        )
    if not message.at <= size <= len(body):
        raise CorruptLog("a GTID_TAGGED event with a size that is none")
    sid, tag = bytes(_UUID_SIZE), b""
    numbers: dict[int, int] = {}
    last = -1
    while message.at < size:
        field = message.unsigned()
        if field <= last:
            raise CorruptLog("a GTID_TAGGED event with fields out of order")
        last = field
        if field == _UUID:
            sid = message.octets(_UUID_SIZE)
        elif field == _TAG:
            tag = message.read(min(message.unsigned(), _MAX_TAG + 1))
        elif field < _FIELDS:
            numbers[field] = message.signed() if field in _SIGNED else message.unsigned()
        else:
            break  # a field of a later version, which a reader need not know
    if numbers.get(_NUMBER, 0) < 1 or len(tag) > _MAX_TAG or not tag.isascii():
        raise CorruptLog("a GTID_TAGGED event without a GTID")
    committed = numbers.get(_FIRST_COMMITTED, numbers.get(_COMMITTED, 0))
    return GtidEvent(sid, numbers[_NUMBER], tag.decode(), committed)
