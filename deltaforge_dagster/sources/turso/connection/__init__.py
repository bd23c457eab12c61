"""Sessions with a database: in a file (`files`) or on a server (`hrana`)."""
