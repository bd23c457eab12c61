"""Definitions of SQLite tables."""
