"""Benchmarks: each measures ours against a named reference in the same run, prints a table and writes `results/NAME.json`."""
