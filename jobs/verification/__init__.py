"""Proof in production: recompute what a stream has written from its lineage, and compare it to the bit."""
