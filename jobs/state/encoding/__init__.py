"""Rows, states and estimates as packed columns; keys and routing."""
