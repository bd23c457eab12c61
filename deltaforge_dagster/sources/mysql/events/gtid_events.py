"""GTID events: the GTID of a transaction, and when it was committed.

A GTID event without a tag has fields at fixed offsets (`binlog`), which a kernel reads. With a tag
(MySQL 8.3 and later, type 42) it is a message of the server's serialization library (manual of the
server's source: "PageLibsMysqlSerialization"; fields as in `Gtid_event::define_fields`)::

    version 1 | size of the message, from here back to its start | last field that must be known, +
    1
    | for each field that is there: number of the field | value

      0 flags   1 UUID, a number per byte   2 number of the GTID (signed)   3 tag: size, text
      4, 5 clocks (signed)   6 commit time on this server   7 on the first server, if it is another
      8 size of the transaction   9 version of this server   10 of the first server
      11 commit group

All numbers have a variable size: the number of low-order one bits of the first byte says how many
bytes follow. The value, little-endian, begins above the zero bit after them. A signed number has
its sign in the lowest bit; if it is negative, the other bits are inverted.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.binlog import GTID, GTID_TAGGED, FieldReader

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
