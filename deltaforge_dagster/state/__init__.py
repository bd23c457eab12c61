"""The state store: the progress of all pipelines, in SQLite or PostgreSQL.

`records` defines its rows as values, `tables` as SQL tables; `database` connects, and `migrate` upgrades
the tables. The store is used in two ways:

- `store` is for everybody: it reads, and writes what users request (its parts: `store_journal`,
  `store_sinks`, `store_schemas`, `store_snapshots`, `store_dead_letters`, `store_sensing`,
  `store_specs`);
- `fenced` is for the holder of the lease (`leases`): each write checks the epoch in its own transaction
  (its parts: `journal_writes`, `checkpoint_writes`, `dead_letter_writes`, `snapshot_writes`).

`primitives` are small general-purpose structures that other modules use, such as `schemas` for its log
of table versions.
"""
