"""Sensing beside deliveries: what journaled segments tell of documents and tables.

`sensing` is the thread of a run, `job` is what Spark's task does, and `views` is what commands, the API and Dagster show.
"""
