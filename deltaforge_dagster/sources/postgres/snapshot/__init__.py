"""Snapshots of PostgreSQL's tables: read in `chunks` with COPY, with values as the log has them."""
