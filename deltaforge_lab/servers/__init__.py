"""Real servers for the demo, benchmarks and tests.

They are databases, brokers, object storage, registries, and an HTTP server that records.
"""
