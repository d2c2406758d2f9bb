"""The pipeline's verbs, and the rooms that they share."""

import os

# In KiB. Arrow's allocator reserves 1 GB at once, within which the system would not limit it (jobs.landing.bounds).
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "65536")
