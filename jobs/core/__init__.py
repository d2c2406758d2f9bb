"""Errors, the clock, durations, settings, reports, commands and signals; no knowledge of filters, tables or Spark."""
