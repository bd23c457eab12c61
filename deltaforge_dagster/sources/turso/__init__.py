"""Turso, libSQL and SQLite as a source: tables of changes, or new rows, read at intervals.

`source` is what the run sees; `modes` chooses which way changes are found: `native`, `triggers` or `polling`,
all as `readings`. Databases are `files` or answer over `hrana`, both as `sessions`. `changes` makes record
batches, with `records` and `values` for rows, `definitions` and `history` for tables.
"""
