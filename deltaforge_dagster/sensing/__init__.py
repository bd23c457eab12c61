"""Sensing: which fields documents have, and where rows differ from what their table declares."""
