"""The Python side of the SQL processor.

`transit` passes rows through Spark's engine and back, `spliced_fields` sets the computed values.
"""
