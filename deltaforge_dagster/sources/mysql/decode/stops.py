"""Stop codes of the kernel `scan`: why it returned before the end of the buffer.

The decoder handles what stopped the kernel (a table that is new, an event that it leaves to Python), or raises the error.
"""

from __future__ import annotations

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
