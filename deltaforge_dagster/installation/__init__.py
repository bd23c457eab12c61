"""What runs on this machine: child processes, the processes of runs, and the Spark server.

- `process` starts programs that end with this process; `forked` runs modules in forks of it, and
  `arrow_memory` chooses where Arrow takes its memory;
- `java` finds Java, `maven` fetches jars, and `lake_jars` are those for Delta and Iceberg tables;
- `run_launcher` forks the processes of runs, which have imported `run_process`. The package itself
  can be run: it is Dagster's daemon, as `deltaforge dev` starts it;
- `spark_server` is the installation's own Spark server. `spark_daemon` is the parent of its Python
  workers. `spark_classes` is the archive with which it starts faster, and `spark_recording` makes
  that.
"""
