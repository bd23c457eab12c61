"""Rows of SQLite as change batches."""
