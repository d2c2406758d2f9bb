"""Batch: filter history, learn parameters, commit a snapshot."""
