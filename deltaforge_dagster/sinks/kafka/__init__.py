"""The Kafka sink: a `client` sends chunks of messages with librdkafka.

They are sent in `transactions` when delivery is exactly once. `producer` passes columns of messages
to `librdkafka`.
"""
