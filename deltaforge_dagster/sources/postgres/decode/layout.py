"""Shapes of the integer arrays through which the decoder and its kernels talk.

Every array holds 64-bit integers, one record per line; the constants name the columns.
"""

from __future__ import annotations

# One line per change.
ROW_OP, ROW_TX, ROW_TABLE, ROW_LSN, ROW_INDEX, ROW_START, ROW_END, ROW_LAST = range(8)
"""op (`OP_*`); line of its transaction; number of its table version; XLogData start; place in the
transaction from 0; where its message's tuples start and end in the buffer; 1 on the last change
of a committed transaction."""
ROW_WIDTH = 8

OP_INSERT, OP_UPDATE, OP_DELETE, OP_TRUNCATE, OP_MESSAGE = range(5)
OP_LETTERS = ("c", "u", "d", "t")
"""Of the first four; a logical message is an insert. Its row holds its content, that of a truncate
its flags."""

# One line per transaction.
TX_XID, TX_FINAL_LSN, TX_TS_US, TX_END_LSN, TX_ID_US = range(5)
"""xid; LSN of its commit; commit time, microseconds since 1970; LSN after its commit, 0 while the
transaction is open; the time that event ids begin with.

A message outside of transactions has a line, too: xid 0, its LSN twice, which is where its record
ends, the time when the server sent it, and 0, since its record has no time."""
TX_WIDTH = 5

# State of `scan`, carried from call to call.
OFFSET, ROWS, TXS, OPEN, INDEX, IDLE_LSN, IDLE_XID, REPLY, END, START_LSN = range(10)
"""Where to go on in the buffer; lines used of rows and txs; 1 or `SKIPPED` while a transaction is
open (the last line of txs); changes seen in it, captured or not; newest position with no
transaction open, and the xid that ended there or -1; 1 when an answer is wanted; end of the
message that `scan` stopped at; transactions that committed before this position are skipped."""
STATE_WIDTH = 10
SKIPPED = 2

# One line per table version, and one per column of any of them.
TABLE_FIRST, TABLE_COLUMNS, TABLE_KEYS = range(3)
"""Line of its first column; number of columns; number of key columns."""
TABLE_WIDTH = 3
COLUMN_KIND, COLUMN_DELIMITER, COLUMN_KEY, COLUMN_NAME, COLUMN_NAME_END = range(5)
"""Kind of its values (`json_text`); the byte between the elements of an array of that kind, 0 for
a scalar; 1 for key columns; where `"name":` stands in the names."""
COLUMN_WIDTH = 5
