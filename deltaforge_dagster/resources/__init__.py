"""Settings and lifetime of the resources of a run: Spark session, state store, journal."""
