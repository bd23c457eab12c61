"""Turso, libSQL and SQLite as a source: tables of changes, or new rows, read at intervals.

`source` is what the run sees, `source_type` what everything else asks: options (`config`), positions (`position`) and names;
`connection` has the sessions with databases in files and on servers, `modes` the three
ways in which changes are found, `schema` the tables, `decode` rows and batches; `snapshot` reads whole tables, `read_view` is
what such a read could see.
"""
