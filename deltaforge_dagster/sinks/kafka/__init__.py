"""The Kafka sink: client chunks for librdkafka (`client`, `settings`).

They are sent in `transactions` when delivery is exactly once.
"""
