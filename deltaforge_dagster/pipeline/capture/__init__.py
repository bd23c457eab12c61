"""Capture: the log of a source becomes segments of the journal.

`capture` is the thread that reads one stream; `segments` decides where a segment ends, and groups
segments in ranges; `backlog` reads a long log with several readers (`backlog_job` runs in Spark's
tasks), and `holds` keeps events that cannot be captured yet.
"""
