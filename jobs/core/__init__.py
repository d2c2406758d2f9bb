"""Errors, the clock, durations, settings, reports, commands and signals, independent of filters, tables and Spark."""
