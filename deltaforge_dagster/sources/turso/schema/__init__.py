"""Tables of SQLite: their definitions, and what these were at a place in the change table."""
