"""The filters: one step for every key at once, and what they share."""
