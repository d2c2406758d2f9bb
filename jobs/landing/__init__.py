"""Land rows of files, topics and tables in the measurements table or the quarantine, and replay quarantined rows."""
