"""Sell something: add orders of random customers to the shop's SQLite file.

python shop.py FILE [ORDERS]
"""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing

_TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS orders
  (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL, cents INTEGER NOT NULL);
INSERT OR IGNORE INTO customers VALUES (1, 'Ada'), (2, 'Grace'), (3, 'Edsger');
"""


def sell(file: str, orders: int) -> None:
    """Add orders to the shop's file, in one transaction."""
    with closing(sqlite3.connect(file, timeout=60)) as connection:
        connection.executescript(_TABLES)
        sold = [(random.randint(1, 3), random.randint(1, 99) * 100) for _ in range(orders)]  # noqa: S311
        with connection:
            connection.executemany("INSERT INTO orders (customer, cents) VALUES (?, ?)", sold)


if __name__ == "__main__":
    sell(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
