"""The wire format of PostgreSQL's logical replication, and parsers for infrequent messages.

Manual: "Message Formats", "Streaming Replication Protocol" and "Logical Replication Message
Formats" (version 1 of pgoutput, values as text). Numbers are big-endian, a String ends with a zero
byte, an LSN is an Int64, a time is microseconds since 2000-01-01 UTC::

    backend message    Byte1 type | Int32 size, itself included | content
      'd' CopyData     one of
        'w' XLogData     'w' | LSN start | LSN end | time clock | one pgoutput message
        'k' keepalive    'k' | LSN end | time clock | Byte1 1: answer at once
      'N' NoticeResponse, 'S' ParameterStatus: not part of the log, skipped
      anything else ends the stream

    pgoutput message
      'B' Begin        LSN of the commit | time of the commit | Int32 xid
      'C' Commit       Int8 0 | LSN of the commit | LSN after the commit | time of the commit
      'O' Origin       LSN | String name                          no change: skipped
      'Y' Type         Int32 oid | String schema | String name    before the Relation that uses it;
                       for a domain, the name is that of its base type
      'R' Relation     Int32 oid | String schema | String name | Byte1 replica identity
                       | Int16 columns | per column: Int8 1: part of the key | String name
                       | Int32 type | Int32 modifier
      'I' Insert       Int32 relation | 'N' | tuple
      'U' Update       Int32 relation | ('K' | 'O') tuple, or nothing | 'N' | tuple
      'D' Delete       Int32 relation | ('K' | 'O') | tuple
      'T' Truncate     Int32 relations | Int8 1: CASCADE, 2: RESTART IDENTITY | Int32 relation ...
      'M' Message      Int8 1: transactional | LSN | String prefix | Int32 size | content

    tuple              Int16 columns | per column: 'n' null, 'u' unchanged TOAST value
                       (not sent), or 't' | Int32 size | text

The kernels (`scan`, `rows`) read the frequent messages. This module parses Relation, Type and
logical messages, and has the names of messages for errors.

Logical messages are what `pg_logical_emit_message` writes to the log (from PostgreSQL 14 on). One
becomes an insert: its prefix is the table's name, its content is the row, and the schema is a
reserved one, or that of outboxes (`sources.outbox`) if the pipeline file says so. A transactional
message is part of its transaction, in order with the changes, and disappears if that is rolled
back. A non-transactional message is independent of the transaction that wrote it: it
comes at its log record's place between commits, before that transaction's changes, and also if that
is rolled back. Here it is a transaction of its own, which ends where the record ends: a server that
starts to send at that position repeats neither the message nor a commit before it.

Those whose content is not JSON are skipped, with a warning and a count, because a message has no
content type.
"""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import dataclass

import numpy as np

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.json_text import INVALID, JSON, MAX_DEPTH, OVERHEAD, write_scalar
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.positions import format_lsn

EPOCH_US = 946_684_800_000_000
"""PostgreSQL's epoch, 2000-01-01 UTC, in microseconds since 1970."""

XLOG_HEADER = 25
"""Bytes of an XLogData message before the pgoutput message in it."""

MAX_MESSAGE = (1 << 30) + (1 << 16)
"""The largest valid message size.

PostgreSQL's messages have at most 1 GiB, so a larger size is damage.
"""

MESSAGE_NAMES = {
    "B": "Begin",
    "C": "Commit",
    "D": "Delete",
    "I": "Insert",
    "M": "Message",
    "O": "Origin",
    "R": "Relation",
    "T": "Truncate",
    "U": "Update",
    "Y": "Type",
}
logger = logging.getLogger(__name__)
SCHEMA = "__wal_message"
"""`source.schema` of a message's event, unless the message belongs to an outbox."""
MESSAGES_VERSION = 140000
"""The first server version that sends logical messages, if requested."""
HEARTBEAT = "deltaforge_heartbeat"
"""Prefix of our heartbeat messages, which only move the position and are never delivered."""
_FIRST_WARNINGS, _THEN_EVERY = 10, 1000


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message describes it; `modifier` is `atttypmod`."""

    name: str
    type_oid: int
    modifier: int
    in_identity: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A Relation message; `identity` is `relreplident`: d default, n nothing, f full, i index."""

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[RelationColumn, ...]

    @property
    def full_name(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, slots=True)
class SentType:
    """A Type message: the name of a type at this place in the log.

    For a domain, it is the name of its base type.
    """

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message that `pg_logical_emit_message` wrote.

    Attributes:
        transactional: Whether it is part of its transaction; if not, it is sent even if that is
            rolled back.
        lsn: The end of its log record.
        prefix: Its prefix.
        size: Size of its content, which is at the end of the pgoutput message.
    """

    transactional: bool
    lsn: int
    prefix: str
    size: int


def copy_data(content: bytes) -> bytes:
    """Return a CopyData message with this content."""
    return b"d" + struct.pack(">I", len(content) + 4) + content


def xlog(lsn: int, message: bytes) -> bytes:
    """Return a pgoutput message as an XLogData message that begins and ends at `lsn`."""
    return copy_data(b"w" + struct.pack(">qqq", lsn, lsn, 0) + message)


class _FieldReader:
    """Reads the fields of a message one after another; raises `CorruptLog` at its end."""

    def __init__(self, content: bytes, what: str) -> None:
        self._content = content
        self._label = what
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._content) - self._at

    def number(self, fmt: str) -> int:
        try:
            (value,) = struct.unpack_from(fmt, self._content, self._at)
        except struct.error as error:
            raise CorruptLog(f"{self._label} ends too early") from error
        self._at += struct.calcsize(fmt)
        return int(value)

    def string(self) -> str:
        end = self._content.find(b"\0", self._at)
        if end < 0:
            raise CorruptLog(f"a name in {self._label} does not end")
        raw, self._at = self._content[self._at : end], end + 1
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptLog(f"a name in {self._label} is not UTF-8") from error

    def finish(self) -> None:
        if self.left:
            raise CorruptLog(f"{self._label} goes on after its last field")


def parse_relation(content: bytes) -> Relation:
    """Parse a Relation message, without its leading type byte.

    Raises:
        CorruptLog: The bytes are not a Relation message, or name a column twice.
    """
    reader = _FieldReader(content, "a Relation message")
    oid = reader.number(">I")
    schema = reader.string() or "pg_catalog"  # sent empty for system tables
    table = reader.string()
    identity = chr(reader.number(">B"))
    columns = []
    for _ in range(reader.number(">H")):
        flags = reader.number(">B")
        name = reader.string()
        columns.append(
            RelationColumn(name, reader.number(">I"), reader.number(">i"), bool(flags & 1))
        )
    reader.finish()
    if identity not in "dnfi":
        raise CorruptLog(f"table {schema}.{table} has an unknown replica identity {identity!r}")
    if len({column.name for column in columns}) != len(columns):
        raise CorruptLog(f"table {schema}.{table} has two columns of one name")
    return Relation(oid, schema, table, identity, tuple(columns))


def parse_type(content: bytes) -> SentType:
    """Parse a Type message, without its leading type byte.

    Raises:
        CorruptLog: The bytes are not a Type message.
    """
    reader = _FieldReader(content, "a Type message")
    oid = reader.number(">I")
    schema = reader.string() or "pg_catalog"
    name = reader.string()
    reader.finish()
    return SentType(oid, schema, name)


def parse_message(content: bytes) -> LogicalMessage:
    """Parse a logical message, without its leading type byte.

    Raises:
        CorruptLog: The bytes are not a logical message.
    """
    reader = _FieldReader(content, "a logical message")
    flags = reader.number(">B")
    lsn = reader.number(">q")
    prefix = reader.string()
    size = reader.number(">I")
    if flags > 1 or lsn < 0 or size != reader.left:
        raise CorruptLog("a logical message does not follow its format")
    return LogicalMessage(bool(flags), lsn, prefix, size)


def truncate_payload(flags: int) -> str:
    """Return the JSON text of a TRUNCATE event's column `ddl`, from its message's flags."""
    cascade, restart = json.dumps(bool(flags & 1)), json.dumps(bool(flags & 2))
    return f'{{"sql":"TRUNCATE","cascade":{cascade},"restart_identity":{restart}}}'


class MessageFilter:
    """Decides which logical messages of a stream become events.

    Attributes:
        skipped: Number of messages skipped so far because their content is not JSON.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._out = np.empty(1 << 12, np.uint8)
        self._stack = np.empty(MAX_DEPTH, np.uint8)

    def takes(self, message: LogicalMessage, content: Bytes) -> bool:
        """Return whether the message becomes an event; count and log one that is not JSON."""
        if message.prefix == HEARTBEAT:
            return False
        if _is_json(content, self._room(content.size), self._stack):
            return True
        self.skipped += 1
        if self.skipped <= _FIRST_WARNINGS or self.skipped % _THEN_EVERY == 0:
            logger.warning(
                "left out the logical message with prefix %r at %s: "
                "its content is no JSON in UTF-8 "
                "(%d such messages since reading began)",
                message.prefix,
                format_lsn(message.lsn),
                self.skipped,
            )
        return False

    def _room(self, size: int) -> Bytes:
        if size + OVERHEAD <= self._out.size:
            return self._out
        return np.empty(size + OVERHEAD, np.uint8)


def _is_json(content: Bytes, out: Bytes, stack: Bytes) -> bool:
    """Return whether content is JSON in UTF-8; a document nested too deeply counts as JSON."""
    try:
        content.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return bool(write_scalar(JSON, content, 0, content.size, out, 0, stack) != INVALID)
