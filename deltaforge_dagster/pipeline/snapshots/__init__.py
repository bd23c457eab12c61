"""Snapshots: chunks of tables are read while the log is captured, and merged into the journal.

`read` plans chunks and has Spark's tasks (`read_job`) write staging files; `chunk_deduplicator`
merges them into the journal, without the rows that changed since and with those that moved between
chunks (`chunk_rows`). `request` requests the snapshot that a pipeline file asks for, and shows
which reading runs are alive.
"""
