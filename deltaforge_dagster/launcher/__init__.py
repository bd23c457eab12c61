"""How Dagster starts the processes of runs."""
