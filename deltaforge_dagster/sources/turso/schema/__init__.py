"""Tables of SQLite: their definitions, now and at a position of the change table."""
