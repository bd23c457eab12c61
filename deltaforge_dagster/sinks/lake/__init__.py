"""Tables of a lakehouse, Delta Lake and Apache Iceberg: one sink with two dialects.

This package has only SQL text and configuration, without Spark: the dialects write SQL, and
`pipeline.lake` has Spark execute it.
"""
