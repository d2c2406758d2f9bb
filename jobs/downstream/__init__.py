"""Queries over the live estimates: the monitor (windows, rules) and forecast skill."""
