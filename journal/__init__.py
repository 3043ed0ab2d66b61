"""What touches Kafka and files for everyone: acknowledged produce, reading a log, topic creation, the payload store."""
