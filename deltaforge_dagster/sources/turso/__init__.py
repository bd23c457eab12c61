"""Turso, libSQL and SQLite as a source: tables of changes, or new rows, read at intervals."""
