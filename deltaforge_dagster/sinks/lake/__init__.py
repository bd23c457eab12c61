"""Tables of a lakehouse: Delta Lake and Apache Iceberg, one sink with two dialects.

Everything here is text and configuration, without Spark: `dialect` writes SQL, `pipeline.lake` has Spark execute it.
"""
