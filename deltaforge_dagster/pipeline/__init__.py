"""The run, and whatever else works on a pipeline. Knows nothing of Dagster.

A live run:

- `run` begins and ends everything (`lease`, `run_end`), with a `run_context` from outside; `work` says whether one is
  needed, `first_start` where it begins;
- `capture`: the source's stream through `schema_approval` and `cutter` into segments and `ranges`; `backlog` for many
  readers, `failover` for another server, `holds` for what cannot be decoded, `chunk_deduplicator` for snapshots;
- `processing`: the chain over each segment (`chains`, `chain_jobs`, `stages`, `processing_job`);
- `deliverer_set`: a `deliverer` per sink, which resumes where `resume` says, sends `delivery_batches` and puts aside
  `dead_letters`. What it sends is prepared once for all sinks: `encode_cache` (which segments together),
  `encoder` (the Spark job), `messages` (its tasks), `encoded_files`, `encoded_segments`, `message_selection`;
- behind them `confirmer`, `backpressure`, `sensing`, `publication`, `meters`.

Beside it, without the lease: `replay`, `reprocessing`, `preview`, `recapture`, `catch_up`, `snapshot_read`,
`retention`, `key_search`. Steps at which tests let a process die are in `failpoints`. Modules called
`..._job` are what Spark's tasks run.
"""
