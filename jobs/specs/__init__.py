"""The model spec: read and checked, with line and remedy for each mistake. No NumPy, no Spark."""
