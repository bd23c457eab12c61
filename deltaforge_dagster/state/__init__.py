"""The state store: how far everything has come, in SQLite or PostgreSQL.

`records` has its rows as values, `tables` as SQL; `database` connects, `migrate` brings tables up to date. It
is used in two ways:

- `store` is for everybody: it reads, and writes what people ask for (in parts: `store_journal`,
  `store_sinks`, `store_schemas`, `store_snapshots`, `store_dead_letters`, `store_sensing`, `store_specs`);
- `fenced` is for the holder of the lease (`leases`): each write proves the epoch in its own transaction (in
  parts: `journal_writes`, `checkpoint_writes`, `dead_letter_writes`, `snapshot_writes`).

`primitives` are small structures that the rest stands on; a log of table versions is one (`schemas`).
"""
