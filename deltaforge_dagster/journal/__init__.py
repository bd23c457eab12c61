"""The journal: the durable, immutable record of captured segments, in Parquet files."""
