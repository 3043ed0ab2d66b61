"""The proxy's cost and latency, against an engine of fixed speed."""
