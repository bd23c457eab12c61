"""The state store: the progress of all pipelines, in SQLite or PostgreSQL.

`store` opens it. It has one repository per noun, most in a module of that name: `pipelines`,
`ranges`, `segments`, `journals`, `checkpoints`, `table_commits`, `holds`, `snapshots`,
`relocated_rows`, `schemas`, `sensing` and `metrics`. `leases` also has the owners of resources,
`dead_letters` also what was never delivered, and `source_state` has a source's server, table
definitions and gaps. A noun has two classes: the repository is for everybody
(`store.checkpoints.reset(...)`); the writes are for the holder of the lease, whose epoch is checked
in the same transaction (`writer.checkpoints.advance(...)`). The functions of a module take a
connection, for use in the transactions of other modules.

`records` and `snapshot_records` define the rows as values. `database` has what all repositories are
built on: the connection, the tables and their upgrades, and small general-purpose structures.
`since` has no repository: it stores in the key-value table when lasting conditions began. `copies`
backs up and restores a whole store, `legacy` imports the checkpoints of the predecessor.
"""
