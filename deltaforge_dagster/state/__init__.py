"""The state store: the progress of all pipelines, in SQLite or PostgreSQL.

`store` opens it. It has one repository per noun, each in a module of that name: `pipelines`,
`owners`, `leases`, `ranges`, `segments`, `journals`, `checkpoints`, `lake_commits`, `dead_letters`,
`undelivered`, `holds`, `snapshots`, `relocated_rows`, `schemas`, `gaps`, `definitions`,
`failovers`, `sensing` and `metrics`. A module has two classes: the repository is for everybody
(`store.checkpoints.reset(...)`); the writes are for the holder of the lease, whose epoch is checked
in the same transaction (`writer.checkpoints.advance(...)`). Its functions take a connection, for
use in the transactions of other modules.

`records` and `snapshot_records` define the rows as values. `database` has what all repositories are
built on: the connection, the tables and their upgrades, and small general-purpose structures.
Modules without a repository store values in the key-value table: `since` when lasting conditions
began, `early_confirmation` since when a log is confirmed early. `copies` backs up and restores a
whole store, `legacy` and `legacy_storage` import the checkpoints of the predecessor.
"""
