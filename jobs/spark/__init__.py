"""Start Spark, and reach what PySpark does not expose."""
