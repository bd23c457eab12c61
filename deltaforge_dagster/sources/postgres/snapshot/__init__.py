"""Snapshots of PostgreSQL's tables, read in `chunks` with COPY.

The values have the same format as from the log.
"""
