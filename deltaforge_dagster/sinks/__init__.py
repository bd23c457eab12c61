"""Sinks: one family of modules per destination, all behind `base`.

`build` makes them from a pipeline file. Kernels pack whole batches out of Arrow's buffers (`text_columns`).

- `file`: JSON lines.
- `redis`: blocks of XADDs packed by `resp`, over `redis_link`; answers read by `resp_replies`; clusters in
  `redis_cluster`, one `redis_node` each.
- `kafka`: pieces for librdkafka (`kafka_client`, `kafka_settings`), in transactions (`kafka_transactions`).
- `nats`: chains of messages (`nats_session`), packed by `nats_pack` and `nats_commands`, over `nats_link`;
  answers read by `nats_answers`; what the stream takes and holds in `nats_allowed` and `nats_stream`.

`faulty` wraps any of them for tests.
"""
