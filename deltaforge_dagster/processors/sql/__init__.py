"""The Python side of the `sql` processor: rows in `transit` to Spark's engine and back, values set in place."""
