"""The pipeline's verbs, and the rooms that they share."""

import os
import sys

# In KiB. By default Arrow's allocator reserves 1 GB at once, which would defeat memory limits
# (jobs.landing.file_parts).
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "65536")

# `python -m jobs.VERB` puts the current folder, where specs and their modules may be, before the libraries on the path.
# The folder of this code stays.
_here = sys.path[0] if sys.argv[:1] == ["-m"] and not sys.flags.safe_path else ""
if os.path.isdir(_here) and os.path.samefile(_here, ".") and not os.path.samefile(".", f"{__path__[0]}/.."):
    del sys.path[0]
