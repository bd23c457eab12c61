"""Shapes of the integer arrays through which the decoder and its kernels talk.

Every array holds 64-bit integers, one record per line; the constants name the columns. The last ones
are the numbers that `scan` returns: why it stops, and what Python does then.
"""

from __future__ import annotations

# One line per change.
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
"""op (`OP_*`); line of its transaction; number of its table version; end of its event in the log;
place in the transaction from 0; where its images start (the old one, the new one; equal to the
end where there is none) and end in the buffer; where the bitmaps of the columns in each image
stand, and how many columns that are; bytes its JSON texts may need; 1 on the last change of a
committed transaction."""
ROW_WIDTH = 14

OP_INSERT, OP_UPDATE, OP_DELETE = range(3)
OP_LETTERS = ("c", "u", "d")

# One line per transaction.
TX_A, TX_B, TX_NUMBER, TX_TAG, TX_HAS_GTID, TX_TS_US, TX_END = range(7)
"""GTID: the halves of the server's UUID, the number, and a hash of the tag, 0 for none; or, without
a GTID, two hashes of the file's name and where in the file the transaction begins; whether it is a
GTID (`GTID_OF_*`: MariaDB's has the domain and the server's id for the UUID); commit time, microseconds since 1970; where in the file the transaction ends, 0 while it is
open."""
TX_WIDTH = 7
GTID_OF_MYSQL, GTID_OF_MARIADB = 1, 2

# State of `scan`, carried from call to call.
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
    HELD_INDEX,
    MEASURING,
    MEASURED,
    MEASURED_OPEN,
    UNTIL,
) = range(20)
"""Where to go on in the buffer; lines used of rows and txs; `GROUP`, `BEGUN` or `PREPARING` while a
transaction is open (the last line of txs); changes seen in it, captured or not; how far the file is
read; 1 when events end in a CRC32; where the next row of a half-read event stands, 0 for none; start
and end of the event that `scan` stopped at, its packet's end, and where it ends in the file; hashes
of the file's name; `JOINED` or `NESTED` when the buffer has events without packet headers; changes of
the transaction before the rows event that is read; 1 when changes are not noted but
measured (`SectionPlanner`), the bytes of events with captured ones in transactions that have ended, and in
those and the open one; where in the file to stop between two transactions, 0 for nowhere."""
STATE_WIDTH = 20
GROUP, BEGUN, PREPARING = 1, 2, 3
"""After a GTID event; after BEGIN; after XA START."""
JOINED, NESTED = 1, 2
"""One event of the file; events out of another one, which have no sums, and stand where that one
stands."""

# One line per table version, and one per column of any of them.
TABLE_FIRST, TABLE_COLUMNS, TABLE_KEYS, TABLE_CAPTURED, TABLE_SIZE = range(5)
"""Line of its first column; number of columns; number of columns up to the last one of the key, 0
without a key; 1 when its changes are captured, `HELD` when they are kept back; bytes of JSON that a row image needs for its
brackets, names and all values of bounded size."""
TABLE_WIDTH = 5
HELD = 2
(
    COLUMN_KIND,
    COLUMN_SIZE,
    COLUMN_PREFIX,
    COLUMN_KEY,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_FIRST,
    COLUMN_SECOND,
) = range(8)
"""Kind of its values (`values.types`); bytes of a value, where the type fixes that; else bytes of the
length that stands before it; 1 for key columns; where `"name":` stands in the names; two numbers
whose meaning depends on the kind."""
COLUMN_WIDTH = 8

# One line per table that a TABLE_MAP event described, in a hash table.
MAP_ID, MAP_VERSION, MAP_START, MAP_END = range(4)
"""Table id, -1 on a free line; its table version; where the event's content stands in the maps."""
MAP_WIDTH = 4

NEED_MORE, FULL, FOREIGN, SPLIT = range(4)
"""The rest is not whole; no line is left in rows or txs; a packet that is no event; an event in
several packets."""

NEW_TABLE, STATEMENT, NEW_FILE, FORMAT, TAGGED = range(4, 9)
"""An event that Python reads: a TABLE_MAP not seen before; a QUERY that is no transaction control; a
ROTATE; a FORMAT_DESCRIPTION; a GTID_TAGGED."""

PAYLOAD, OF_XA, PREPARED, COMPRESSED, PARTIAL = range(9, 14)
"""An event that holds or is made to others: a TRANSACTION_PAYLOAD; one about rows of an XA
transaction; an XA_PREPARE; one of MariaDB's that is compressed; a PARTIAL_UPDATE_ROWS."""

HELD_ROWS = 14
"""A rows event of a table whose changes are kept back; they are counted."""

UNSUPPORTED, NO_COLUMNS = 15, 16
"""An event that is not decoded; a change without any column in its image."""

REACHED = 17
"""The place between two transactions where the reader was told to stop."""

BAD_EVENT, BAD_SUM, BAD_ORDER, BAD_ROWS, UNKNOWN_TABLE = range(20, 25)
"""Damage: an event that is shorter or longer than its kind; a wrong CRC32; an event where a
transaction may not have it; a row that does not follow its table; a table never described."""
