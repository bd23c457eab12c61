"""Child processes: programs that end with this process, and the Java that Spark and Kafka need."""
