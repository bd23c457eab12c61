"""The Kafka sink: client chunks for librdkafka (`client`, `settings`), in `transactions` when delivery is exactly once."""
