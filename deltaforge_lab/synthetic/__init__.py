"""Logs of MySQL and streams of PostgreSQL made without a server, for benchmarks and tests; one family of types each, too."""
