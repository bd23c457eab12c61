"""Schema sensing: which fields documents have, and where rows differ from their declared table."""
