"""Filter history on Spark: learn parameters and commit a snapshot, estimate every row, forecast keys."""
