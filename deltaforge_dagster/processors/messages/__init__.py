"""Messages of changes: several for one change (`expansion`), the value (`envelope`), destination and key (`routing`), values in Avro (`avro`)."""
