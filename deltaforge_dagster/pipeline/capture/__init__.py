"""Capture: the log of a source becomes segments of the journal.

`capture` is the thread, with its retries. It has `log_reader` read one stream after another;
`segments` decides where a segment ends, and `committer` says in which order a segment becomes
durable, and groups segments in ranges. `backlog` reads a long log with several readers
(`backlog_job` runs in Spark's tasks), and `holds` keeps events that cannot be captured yet.
"""
