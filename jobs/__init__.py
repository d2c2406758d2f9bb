"""The pipeline's verbs, and the rooms that they share."""

import os

# In KiB. By default Arrow's allocator reserves 1 GB at once, which would defeat memory limits
# (jobs.landing.file_parts).
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "65536")
