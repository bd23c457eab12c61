"""Processing: the chain of processors runs over each segment, once, before any sink sees it.

`processing` is the thread that does it; `chain_jobs` makes one Spark job of the `stages` of a
chain, `segment_job` is what its tasks run, and `expressions` is the SQL processor, which Spark
computes.
"""
