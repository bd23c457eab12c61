"""Change data capture with Dagster and Spark: one YAML file is one pipeline."""

__version__ = "0.1.0"
