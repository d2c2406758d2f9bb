"""Measure the pipeline against what Spark itself can move and against per-key state, in one run."""
