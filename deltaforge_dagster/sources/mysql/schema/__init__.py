"""Tables of MySQL: versions for decoding, the catalog, and the statements of the log that change tables."""
