"""The run: lease, capture, preparation, delivery, publication plan. Knows nothing of Dagster."""
