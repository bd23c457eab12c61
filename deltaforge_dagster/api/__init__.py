"""The REST API and the metrics, over the state store and Dagster's instance."""
