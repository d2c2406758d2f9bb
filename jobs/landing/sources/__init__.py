"""Land the sources of a spec: a user's Delta table, topics, or made-up rows (decision 0047)."""
