"""MySQL: the binary log, read as a replica reads it."""
