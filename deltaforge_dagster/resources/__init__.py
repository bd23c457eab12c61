"""Settings and lifetime of what a run needs: Spark session, state store, journal."""
