"""Tables: segments of the journal become commits to the tables of a sink.

`delivery` decides which segments a commit covers, and records that before the commit begins. `stage` has Spark's tasks type
the rows of these segments (`typed_files`) and fold the changes of each key (`fold_job`), into Parquet files by table
(`sinks.tables.staged`); the data never passes through the run's process. What then adds them to a table depends on the
kind: `pipeline.lake` has Spark do it, a database's own writer sends them from the run. For object files, `object_stage` has a
task write the content of each (`object_files`), which the run only copies.
"""
