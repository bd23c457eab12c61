"""Processing: the chain of processors runs over each segment, once, before any sink sees it.

`processing` is the thread that does it, with the chain that `chains` makes of the pipeline file;
`chain_jobs` makes one Spark job of a chain, in which Spark computes SQL, and `stages` is what the
tasks run.
"""
