"""Turns segments of the journal into commits to the tables of a sink.

For each sink, `delivery` asks `planner` what is due, has `committer` write it to the tables and
`recorder` record it in the state store. Which segments a commit covers is recorded before the
commit begins. `stage` has Spark's tasks type the rows of these segments (`typed_files`) and fold
the changes of each key (`fold`), into Parquet files by table (`sinks.tables.staged`); up to here no
data passes through the run's process. How the files are added to a table depends on the kind of
sink: for a lake, `pipeline.lake` has Spark do it; for a database, the sink's own writer sends the
rows from the run. For object files, `object_stage` has a task write the content of each object
(`object_files`), which the run only copies.

`columns` says which columns a table has in a commit, `keys` compares keys, and `reports` carries
the results of tasks to the run. `resync` requests that tables are loaded again.
"""
