"""The engine: everything that works on a pipeline. It does not depend on Dagster.

Folders, from the top; imports point down:

- `run`: a live run, which holds the lease, and starts and stops everything else;
- `replay`: work on closed ranges without the lease: replay, reprocessing, previews, comparison with
  the log, search;
- `capture`: the source's stream becomes segments and ranges;
- `deliver`: one deliverer per sink, with its dead letters;
- `sensing`: examines journaled segments for what their JSON documents and tables look like;
- `health`: whether a pipeline works, and whether its source and sinks are set up as it needs;
- `snapshots`: tables are read in chunks, whose rows are merged into the captured stream;
- `control`: decisions about pipelines: which exist, whether there is work, what is published, what
  may be deleted;
- `lake`: segments become commits of tables, by Spark;
- `process`: the chain of processors over each segment;
- `encode`: segments become messages, in Spark's tasks;
- `schemas`: table versions of a pipeline, and their approval.

The modules directly in this package are shared by these folders: the `run_context` with the lease,
the interface of a `delivery`, `committed` positions, `blocked_keys`, `meters`, `backoff`, the used
part of Spark (`spark_client`, which is imported without pandas: `pandas_later`), and the
`failpoints`, at which tests let a process die. Modules called `..._job` run in Spark's tasks.
"""
