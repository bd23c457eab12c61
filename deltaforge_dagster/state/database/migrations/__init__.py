"""Alembic migrations: one file per version of the state store's tables.

`state.database.migrate` runs them.

To change a table, change `state.database.tables`, add `versions/vNNNN_what.py` whose
`down_revision` is the newest one so far, and write the change with Alembic's operations. There are
no downgrades.
"""
