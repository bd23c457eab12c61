"""Tables of SQLite: their definitions, and how they looked at a place in the change table."""
