"""Sinks: one family of modules per destination, all behind the protocol in `base`.

`build` makes sinks from a pipeline file. Kernels pack whole batches directly from Arrow's buffers
(`text_columns`).

- `file`: JSON lines.
- `redis`: blocks of XADD commands, packed by `resp` and sent over `redis_link`; `resp_replies` reads the
  replies; `redis_cluster` handles clusters, with one `redis_node` for each node.
- `kafka`: client chunks for librdkafka (`kafka_client`, `kafka_settings`), sent in transactions
  (`kafka_transactions`) when delivery is exactly once.
- `nats`: chains of messages (`nats_session`), packed by `nats_pack` and `nats_commands` and sent over
  `nats_link`; `nats_answers` reads the answers; `nats_allowed` checks subjects against the stream, and
  `nats_stream` reads the stream's configuration and the sink's position.

`faulty` wraps any of them for tests.
"""
