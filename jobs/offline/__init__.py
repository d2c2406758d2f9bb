"""Filter or forecast a file without Spark."""
