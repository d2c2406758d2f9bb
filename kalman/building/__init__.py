"""Build a filter from a model definition."""
