"""Real servers from packages, for the demo, benchmarks and tests: PostgreSQL, Redis."""
