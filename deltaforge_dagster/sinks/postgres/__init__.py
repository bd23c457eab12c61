"""The PostgreSQL sink: it keeps tables in a database as they are in the source.

`writer` applies the staged changes of a table in one transaction: `copy_rows` encodes them in the
binary format of COPY, `statements` builds the SQL that merges them into the table, `target` finds,
creates and alters the table, and `commits` records which commits the table has. `types` maps
column types and says which columns hold which values. `server` has connections, names and errors.
"""
