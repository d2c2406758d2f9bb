"""What a micro-batch writes: estimates, latest states, topics, files, functions, the archive and quarantine."""
