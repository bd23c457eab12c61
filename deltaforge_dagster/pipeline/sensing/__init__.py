"""Sensing: learn the structure of JSON documents and the drift of tables from journaled segments.

It works beside delivery. `sensing` is the thread of a run, `job` is what Spark's task does, and
`views` is what commands, the API and Dagster show.
"""
