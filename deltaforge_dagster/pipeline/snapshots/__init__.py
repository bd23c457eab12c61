"""Snapshots: tables are read in chunks beside the stream, and each chunk joins the journal at its place.

`read` plans chunks and has Spark's tasks (`read_job`) write staging files; `chunk_deduplicator` merges them into the
journal, without the rows that changed since (`deduplicated_rows`) and with those that moved between chunks
(`relocated_rows`). `request` makes the snapshot that a pipeline file asks for, `liveness` shows that a reading run lives.
"""
