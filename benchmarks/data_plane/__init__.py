"""The data plane against in-memory peers: the same workload, process counts and machine."""
