"""Object files: changes as Parquet or JSON lines in a bucket, or in a local folder.

`stores` puts an object into its place, so that it is seen whole or not at all; `names` says where that is; `writer` does it
for the objects of a commit, whose content Spark has made.
"""
