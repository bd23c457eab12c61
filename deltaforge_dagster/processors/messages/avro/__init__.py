"""Messages in Avro: their schemas (`schema`), row images (`rows`), whole events (`envelope`)."""
