"""Snapshots of PostgreSQL's tables: read in `chunks` with COPY, with values in the same format as from the log."""
