"""Single-node Apache Kafka as a child process, from jars that a lock file pins (`embedded.EmbeddedKafka`)."""
