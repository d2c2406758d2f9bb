"""Forecast keys on Spark from the state of a running stream or of a snapshot, into a table."""
