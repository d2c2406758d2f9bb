"""Likelihood, derivatives and directions of many keys at once."""
