"""Examples: specs with the rows to try them on. Each folder is one set."""
