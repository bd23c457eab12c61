"""Snapshots of MySQL's tables: read in `chunks`, with values as the log has them."""
