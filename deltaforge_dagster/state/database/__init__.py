"""What all repositories of the state store are built on: SQL, in SQLite or PostgreSQL.

`database` connects, `tables` defines the tables, and `migrate` upgrades them (`migrations`). `rows`
reads rows as the values of `state.records`. `primitives` are small general-purpose structures.
"""
