"""Synthetic MySQL binary logs and PostgreSQL replication streams, made without a server.

They are for benchmarks and tests. There are streams of an ordinary table, and streams of one type
family each.
"""
