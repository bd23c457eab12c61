"""Dagster assets of a pipeline: `changes` and sinks with range partitions, their checks and metadata."""
