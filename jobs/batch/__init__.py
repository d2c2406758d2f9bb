"""History through the filter, on Spark: learn parameters and commit a snapshot, estimate every row, forecast keys."""
