"""The sinks of a micro-batch: estimates, latest states, topics, files, functions, the archive and quarantine."""
