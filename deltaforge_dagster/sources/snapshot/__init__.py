"""What snapshots of all sources share: `base` is the interface, `rows` makes record batches of rows."""
