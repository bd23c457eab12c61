"""Layout of the integer arrays through which the decoder and its kernels exchange data.

Every array has 64-bit integers, one record per line; the constants are the indexes of the fields.
The last constants are the numbers that `scan` returns: why it stopped, and so what Python has to
do.
"""

from __future__ import annotations

# `rows`: one line per change.
(
    ROW_OP,
    ROW_TX,
    ROW_TABLE,
    ROW_POS,
    ROW_INDEX,
    ROW_OLD,
    ROW_NEW,
    ROW_END,
    ROW_OLD_BITS,
    ROW_NEW_BITS,
    ROW_OLD_COUNT,
    ROW_NEW_COUNT,
    ROW_SIZE,
    ROW_LAST,
) = range(14)
"""op (`OP_*`); line of its transaction in `txs`; number of its table version; end of its event in
the log; index in the transaction, from 0; start of the old and of the new image in the buffer, and
end of both (a missing image is empty); offsets of the bitmaps of columns in the old and the new
image; numbers of columns in them; the most bytes that its JSON texts may need; 1 for the last
change of a committed transaction.
"""
ROW_WIDTH = 14

OP_INSERT, OP_UPDATE, OP_DELETE = range(3)
OP_LETTERS = ("c", "u", "d")

# `txs`: one line per transaction.
TX_A, TX_B, TX_NUMBER, TX_TAG, TX_HAS_GTID, TX_TS_US, TX_END = range(7)
"""With a GTID: the halves of the server's UUID (MariaDB: domain and server id), the number, and a
hash of the tag, 0 for none. Without one: two hashes of the file's name, and where in the file the
transaction begins. Then `GTID_OF_*`, 0 without a GTID; commit time in microseconds since 1970;
where in the file the transaction ends, 0 while it is open.
"""
TX_WIDTH = 7
GTID_OF_MYSQL, GTID_OF_MARIADB = 1, 2

# `state`: the state of `scan`, kept from call to call.
(
    OFFSET,
    ROWS,
    TXS,
    OPEN,
    INDEX,
    POS,
    CHECKSUM,
    NEXT_ROW,
    EVENT,
    EVENT_END,
    PACKET_END,
    EVENT_POS,
    FILE_A,
    FILE_B,
    BARE,
    PARKED_INDEX,
    MEASURING,
    MEASURED,
    MEASURED_OPEN,
    UNTIL,
) = range(20)
"""OFFSET: where to continue in the buffer. ROWS, TXS: used lines of `rows` and `txs`. OPEN:
`GROUP`, `BEGUN` or `PREPARING` while a transaction (the last line of `txs`) is open, else 0. INDEX:
changes in it so far, captured or not. POS: offset in the file up to which it has been read.
CHECKSUM: 1 if events end with a CRC32. NEXT_ROW: where in the buffer to continue a partly read rows
event, 0 for none. EVENT, EVENT_END, PACKET_END, EVENT_POS: start and end in the buffer of the event
at which `scan` stopped, end of its packet, and its end in the file. FILE_A, FILE_B: hashes of the
file's name. BARE: `JOINED` or `NESTED` if the buffer has events without packet headers, else 0.
PARKED_INDEX: changes of the transaction before the current rows event. MEASURING: 1 if changes are
only measured, not recorded (`SectionPlanner`). MEASURED, MEASURED_OPEN: bytes of events with
captured changes, without and with those of the open transaction. UNTIL: offset in the file at which
to stop between two transactions, 0 for none."""
STATE_WIDTH = 20
GROUP, BEGUN, PREPARING = 1, 2, 3
"""Values of `state[OPEN]`: after a GTID event; after BEGIN; after XA START."""
JOINED, NESTED = 1, 2
"""Values of `state[BARE]`: one event joined from several packets; nested events, which have no
checksums, and the file position of the event that contains them.
"""

# `tables`: one line per table version. `columns`: one line per column of any of them.
TABLE_FIRST, TABLE_COLUMNS, TABLE_KEYS, TABLE_CAPTURED, TABLE_SIZE = range(5)
"""Line of its first column; number of columns; number of columns up to the last one of the key, 0
without a key; 1 if its changes are captured, `ON_HOLD` if they are parked, else 0; the most bytes
of JSON that a row image needs for braces, names and all values of bounded size.
"""
TABLE_WIDTH = 5
ON_HOLD = 2
(
    COLUMN_KIND,
    COLUMN_SIZE,
    COLUMN_PREFIX,
    COLUMN_KEY,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_FIRST,
    COLUMN_SECOND,
    COLUMN_DEFAULT,
    COLUMN_DEFAULT_END,
) = range(10)
"""Kind of its values (`values.types`); size of a value, if its type has a fixed size; otherwise,
bytes of the length before each value; 1 for key columns; start and end of `"name":` in `names`; two
numbers whose meaning depends on the kind (`MysqlValueType`); start and end in `names` of its
default as JSON, which an insert without it gets, or `NOT_ASKED` or `NO_DEFAULT`.
"""
COLUMN_WIDTH = 10
NOT_ASKED, NO_DEFAULT = -1, -2
"""Values of `COLUMN_DEFAULT` without a default. `NOT_ASKED`: it was not looked up yet, so an insert
that lacks the column stops the scan (`LACKING`). `NO_DEFAULT`: none is certain, so the insert is
written without the column."""

# `maps`: a hash table with one line per table id that a TABLE_MAP event described.
MAP_ID, MAP_VERSION, MAP_START, MAP_END = range(4)
"""Table id, -1 on a free line; table version; start and end of the event's body in `map_texts`."""
MAP_WIDTH = 4

NEED_MORE, FULL, FOREIGN, SPLIT = range(4)
"""Why `scan` stopped: the next event is incomplete; `rows` or `txs` is full; a packet that is not
an event; an event in several packets."""

NEW_TABLE, STATEMENT, NEW_FILE, FORMAT, TAGGED = range(4, 9)
"""Events that Python handles: a new TABLE_MAP; a QUERY other than ordinary transaction control; a
ROTATE; a FORMAT_DESCRIPTION; a GTID_TAGGED.
"""

PAYLOAD, OF_XA, PREPARED, COMPRESSED, PARTIAL = range(9, 14)
"""Events that Python replaces by other events, or keeps for later: a TRANSACTION_PAYLOAD; a
TABLE_MAP or rows event of an XA transaction; an XA_PREPARE; a compressed event of MariaDB; a
PARTIAL_UPDATE_ROWS."""

PARKED_ROWS = 14
"""A rows event of a table on hold; its changes were counted."""

LACKING = 18
"""A rows event whose inserts lack columns with defaults that are not known yet.

Scan it again once they are.
"""

UNSUPPORTED, NO_COLUMNS = 15, 16
"""An event type that is not supported; a rows event whose images have no columns."""

REACHED = 17
"""The reader is between two transactions, at or after the offset at which it should stop
(`state[UNTIL]`)."""

BAD_EVENT, BAD_SUM, BAD_ORDER, BAD_ROWS, UNKNOWN_TABLE = range(20, 25)
"""Damage: an event that is too short or too long for its type; a wrong CRC32; an event that may not
occur at this point of a transaction; a row that does not match its table; a table without TABLE_MAP
event."""
