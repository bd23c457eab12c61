"""Tables of MySQL: versions for decoding, the catalog, and the effect of DDL in the log."""
