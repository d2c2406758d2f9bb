"""Compare two generations on the same rows: statistics, decision and report."""
