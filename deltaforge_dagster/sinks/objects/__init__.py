"""Object files: changes as Parquet or JSON lines in a bucket, or in a local folder.

`stores` puts an object into its place atomically: readers see it whole or not at all. `writer` puts
the objects of a commit, whose content Spark has made, and names them.
"""
