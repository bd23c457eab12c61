"""Real servers for the demo, benchmarks and tests: databases, brokers, object storage, registries; an HTTP server that records."""
