"""Real servers for the demo, benchmarks and tests: PostgreSQL, MySQL, MariaDB, Redis, Kafka, NATS, a schema registry."""
