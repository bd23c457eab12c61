"""Tests of the source for Turso, libSQL and SQLite."""
