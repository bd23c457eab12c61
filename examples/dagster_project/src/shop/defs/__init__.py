"""What Dagster loads: components, and Python files."""
