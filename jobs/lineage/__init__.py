"""Which generation is live, who may drive it, what it was built with, and whether it may resume."""
