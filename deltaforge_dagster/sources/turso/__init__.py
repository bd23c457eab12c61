"""Turso, libSQL and SQLite as a source: a change table, or new rows, polled at intervals.

`source` is the interface to the run; `source_type` is that to everything else: options, names and
positions (`position`). `connection` opens sessions with databases in files and on servers. Changes
are found by `native`, `triggers` or `polling`; `mode` chooses one of them, and `changes` has their
common interface, and makes batches. `schema` has the definitions of tables, `values` the values of
rows; `snapshot` reads whole tables, `read_view` says what such a read could see. `preflight`
inspects the database.
"""
