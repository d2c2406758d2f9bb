"""Interpret the values of raw rows: numbers, times, keys and missing values."""
