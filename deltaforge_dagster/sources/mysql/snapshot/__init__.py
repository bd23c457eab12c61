"""Snapshots of MySQL's tables: read in `chunks`, with values in the same format as from the log."""
