"""Layout of the integer arrays through which the decoder and its kernels exchange data.

Every array has 64-bit integers, one record per line; the constants are the indexes of the fields.
"""

from __future__ import annotations

# `rows`: one line per change.
ROW_OP, ROW_TX, ROW_TABLE, ROW_LSN, ROW_INDEX, ROW_START, ROW_END, ROW_LAST = range(8)
"""op (`OP_*`); line of its transaction in `txs`; number of its table version; start LSN of its
XLogData message; index in the transaction, from 0; start and end of its message's tuples in the
buffer; 1 for the last change of a committed transaction.
"""
ROW_WIDTH = 8

OP_INSERT, OP_UPDATE, OP_DELETE, OP_TRUNCATE, OP_MESSAGE = range(5)
OP_LETTERS = ("c", "u", "d", "t")
"""The op in the change frame, by `OP_*`; `OP_MESSAGE` is an insert.

In place of tuples, a row of a logical message has its content, that of a truncate its flags.
"""
# `txs`: one line per transaction.
TX_XID, TX_FINAL_LSN, TX_TS_US, TX_END_LSN, TX_ID_US = range(5)
"""xid; LSN of its commit record; commit time, microseconds since 1970; LSN after the commit record,
0 while the transaction is open; the time with which event ids begin. A non-transactional message
has a line, too: xid 0; the end LSN of its record in both LSN fields; the time when the server sent
it; 0 for event ids, since its record has no time.
"""
TX_WIDTH = 5

# `state`: the state of `scan`, kept from call to call.
OFFSET, ROWS, TXS, OPEN, INDEX, IDLE_LSN, IDLE_XID, REPLY, END, START_LSN = range(10)
"""Where to continue in the buffer; used lines of `rows` and `txs`; 1 or `SKIPPED` while a
transaction (the last line of `txs`) is open, else 0; changes in it so far, captured or not; newest
position at which no transaction is open, and the xid that ended there, or -1; 1 if the server
requests a reply; end of the message at which `scan` stopped; start position: transactions that
committed before it are skipped.
"""
STATE_WIDTH = 10
SKIPPED = 2

# `tables`: one line per table version. `columns`: one line per column of any of them.
TABLE_FIRST, TABLE_COLUMNS, TABLE_KEYS = range(3)
"""Line of its first column; number of columns; number of key columns."""
TABLE_WIDTH = 3
COLUMN_KIND, COLUMN_DELIMITER, COLUMN_KEY, COLUMN_NAME, COLUMN_NAME_END = range(5)
"""Kind of its values, or of an array's elements (`kernels.json_text`); the delimiter of an array's
elements, 0 for a scalar; 1 for key columns; start and end of `"name":` in `names`.
"""
COLUMN_WIDTH = 5
