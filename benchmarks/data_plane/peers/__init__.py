"""Peers from PyPI. Each script runs with its own environment's Python and imports nothing of ours.

A script takes `tokens trajectories` and prints one JSON object: `put_ms` and `bulk_put_ms` (CPU-ms per trajectory at the
producer: one by one from 64 sessions that wait, and in groups of 8), `rate` (trajectories a second, end to end), and of the
crash `lost` and `twice`. Whole trajectories are put, whatever the turns: peers have no turns.
"""
