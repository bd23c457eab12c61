"""Tests of tables of a lakehouse: options, names and SQL."""
