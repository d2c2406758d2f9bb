"""Forecasts, scoring rules and diagnostics of a filter."""
