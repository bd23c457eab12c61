"""From bytes of the replication stream to change batches; `decoder` is the entry point."""
