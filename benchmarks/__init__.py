"""Measure the pipeline against a bare shuffle through Spark and against per-key state, in one run."""
