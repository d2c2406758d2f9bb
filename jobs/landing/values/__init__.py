"""What the values of raw rows mean: numbers, keys, and what is missing."""
