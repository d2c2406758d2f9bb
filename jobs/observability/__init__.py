"""Progress records, lag, metrics and profiles: plain data about runs."""
