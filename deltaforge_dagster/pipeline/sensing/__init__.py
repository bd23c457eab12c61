"""Sensing, beside delivery: examine journaled segments to learn the structure of JSON documents and the drift of tables.

`sensing` is the thread of a run, `job` is what Spark's task does, and `views` is what commands, the
API and Dagster show.
"""
