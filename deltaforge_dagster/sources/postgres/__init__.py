"""PostgreSQL: logical replication stream, pgoutput decoding, slot and publication."""
