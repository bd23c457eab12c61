"""Has Spark add staged changes to Delta and Iceberg tables, and maintain these tables.

`writer` applies commits exactly once, to a `target` and the table of its `pending` changes;
`maintenance` compacts files and deletes what is older than the retention; `recorded_commits` reads
the last commit of a table, and the counts that the formats keep themselves. `spark_failures` says
what an error means for the table.
"""
