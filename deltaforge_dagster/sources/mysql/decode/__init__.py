"""From bytes of the binary log to change batches; `decoder` is the entry point."""
