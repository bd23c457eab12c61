"""Is there work? The sensor of a pipeline, its schedule, and retention as a scheduled job."""
