"""Turso, libSQL and SQLite as a source: a change table, or new rows, polled at intervals.

`source` is the interface to the run; `source_type` is that to everything else: options (`config`),
positions (`position`) and names. `connection` opens sessions with databases in files and on
servers, `modes` has the three ways to find changes, `schema` the definitions of tables, `decode`
rows and batches; `snapshot` reads whole tables, `read_view` says what such a read could see.
"""
