"""Alembic's folder: one file per version of the state store's tables, run by `state.migrate`."""
