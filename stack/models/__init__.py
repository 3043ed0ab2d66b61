"""Checkpoints of the two demos, as standard Hugging Face directories that any engine can serve."""
