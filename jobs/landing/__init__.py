"""From files, topics and tables to the measurements table or quarantine, and back out of it."""
