"""Snapshots as every source offers them: `base` is the interface, `rows` makes change batches."""
