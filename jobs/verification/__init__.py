"""Proof in production: recompute a stream's output from its lineage, and compare it bit by bit."""
