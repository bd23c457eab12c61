"""What all sources' snapshots share: `base` is the interface, `rows` makes record batches."""
