"""Proof in production: recompute a stream's output from its lineage, and compare it to the bit."""
