"""Lake tables: Spark adds the staged changes of a commit to Delta and Iceberg tables, and maintains these.

`writer` applies commits exactly once, to a `target` and the table of its `pending` changes; `maintenance` compacts files and
deletes what has outlived the retention; `figures` are what the formats count themselves.
"""
