"""Compare two generations on the same rows: statistics, verdict and report."""
