"""Lake tables: segments of the journal become commits of tables, made by Spark.

The data never passes through the run's process. `stage` has Spark's tasks type the rows of some segments and fold the
changes of each key, into Parquet files that `staged` describes; `writer` has Spark add them to tables. `delivery`
decides which segments a commit covers, and records that before the commit begins.
"""
