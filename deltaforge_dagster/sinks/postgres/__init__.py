"""The PostgreSQL sink: it keeps tables in a database as they are in the source.

`writer` applies the staged changes of a table in one transaction: `copy_rows` has them in the binary format of COPY,
`statements` what merges them into the table, `target` finds, makes and alters the table, and `commits` remembers in the
same transaction which commits it has. `types` says which column has which values.
"""
