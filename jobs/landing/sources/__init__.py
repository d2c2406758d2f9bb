"""Sources that land first: a user's Delta table, several topics, made-up rows (decision 0047)."""
