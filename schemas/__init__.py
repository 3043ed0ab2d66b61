"""The contract: events, topics, ids, Arrow schemas, settings, errors and the pure rules.

Imports no I/O library and none of our packages.
"""
