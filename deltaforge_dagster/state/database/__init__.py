"""What all repositories of the state store are built on: SQL, in SQLite or PostgreSQL.

`database` connects, `tables` defines the tables and reads their rows as the values of
`state.records`, and `migrate` upgrades them (`migrations`). `primitives` are small general-purpose
structures.
"""
