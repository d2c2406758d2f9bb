"""Show, summarise, export, discard, check again and replay the rejected rows in the quarantine."""
