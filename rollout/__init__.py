"""Rollout: workers that pull prompt groups and run agents, the client of the proxy, and the tasks of the demos."""
