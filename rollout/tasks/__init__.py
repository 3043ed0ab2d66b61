"""The tasks of the two demos: each is one module with `agent` and `dataset`."""
