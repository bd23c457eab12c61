"""Real servers for the demo, benchmarks and tests: databases, brokers, object storage; and an HTTP server that records."""
