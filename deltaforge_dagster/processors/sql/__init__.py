"""The Python side of the SQL processor: rows in `transit` to Spark's engine and back, values set in place."""
