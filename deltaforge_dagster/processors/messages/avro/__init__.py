"""Messages in Avro: their schemas (`schema`), row images as records (`rows`), and the events around them (`envelope`)."""
